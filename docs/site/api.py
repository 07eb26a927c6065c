"""Makes docs/api.md from signatures and docstrings: `python docs/site/api.py`. tests/test_docs.py compares the two."""

import dataclasses
import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import fused_layernorm  # noqa: E402
from fused_layernorm import compat  # noqa: E402

FUNCTIONS = ["fused_layer_norm", "fused_rms_norm", "fused_add_layer_norm", "fused_add_rms_norm",
             "fused_layer_norm_add", "fused_rms_norm_add", "fused_sandwich_rms_norm", "fused_adaptive_layer_norm",
             "fused_adaptive_rms_norm", "fused_gated_rms_norm", "fused_gated_layer_norm", "fused_layer_norm_quant",
             "fused_rms_norm_quant"]  # fmt: skip
MODULES = ["FusedLayerNorm", "FusedRMSNorm", "FusedAddLayerNorm", "FusedAddRMSNorm", "FusedLayerNormAdd",
           "FusedRMSNormAdd", "FusedSandwichRMSNorm", "FusedAdaptiveLayerNorm", "FusedAdaptiveRMSNorm",
           "FusedGatedRMSNorm", "FusedGatedLayerNorm"]  # fmt: skip
MODELS = ["replace_norms", "restore_norms", "ReplaceReport", "profile", "ProfileReport"]
BUILD = ["backend", "build", "include_dir"]
SECTION = re.compile(r"^(Args|Returns|Raises|Example):\n", re.MULTILINE)
ENTRY = re.compile(r"^    (\S[^:]*): ", re.MULTILINE)


def markdown(text: str) -> str:
    """A docstring's text as Markdown: double backticks, formulas, indented code."""
    text = re.sub(r":math:`([^`]+)`", r"$\1$", re.sub(r"``([^`]+)``", r"`\1`", text))
    text = re.sub(r"\.\. math:: ((?:.+\n?(?:    .+\n?)*))", lambda m: f"$$\n{' '.join(m[1].split())}\n$$\n", text)
    return re.sub(r"::\n\n((?:    .*\n?|\n)+)", lambda m: f":\n\n```python\n{inspect.cleandoc(m[1])}\n```\n\n", text)


def cell(text: str) -> str:
    return markdown(" ".join(text.split())).replace("|", "\\|")


def entries(section: str) -> list[tuple[str, str]]:
    """(name, text) of each argument or error."""
    parts = ENTRY.split(section)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def type_of(parameter: inspect.Parameter) -> str:
    annotation = parameter.annotation
    return "" if annotation is parameter.empty else annotation if isinstance(annotation, str) else annotation.__name__


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]) + "\n"


def arguments(thing) -> str:
    rows, keyword_only, told = [], False, told_by(thing)
    for name, parameter in inspect.signature(thing).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            rows.append(["*by keyword*", "", "", ""])
        default = "" if parameter.default is parameter.empty else f"`{parameter.default!r}`"
        kind = f"`{type_of(parameter)}`".replace("|", "\\|") if type_of(parameter) else ""
        rows.append([f"`{name}`", kind, default, cell(told[name]) if name in told else elsewhere(thing, name)])
    return table(["argument", "type", "default", "meaning"], rows)


def attributes(thing) -> str:
    """The fields and properties of a dataclass, each with the comment behind it or its docstring."""
    source = inspect.getsource(thing)
    rows = []
    for field in dataclasses.fields(thing):
        meaning = re.search(rf"^    {field.name}: [^#\n]*# (.*)$", source, re.MULTILINE)
        rows.append([f"`{field.name}`", f"`{field.type}`".replace("|", "\\|"), cell(meaning[1]) if meaning else ""])
    for name, value in vars(thing).items():
        if isinstance(value, property):
            kind = inspect.signature(value.fget).return_annotation
            rows.append([f"`{name}`", f"`{kind}`".replace("|", "\\|"), cell(inspect.getdoc(value) or "")])
    return table(["attribute", "type", "meaning"], rows)


def elsewhere(thing, name: str) -> str:
    """Where an argument is described if the docstring omits it."""
    if inspect.isclass(thing):
        base = next(cls for cls in thing.__mro__ if cls.__module__.startswith("torch"))
        is_torchs = name in inspect.signature(base).parameters
        return f"as in `torch.nn.{base.__name__}`" if is_torchs else "as in the function"
    # The same function of the other norm; the plain norm; its sibling
    siblings = [other for other in FUNCTIONS if without_norm(other) == without_norm(thing.__name__)]
    for function in (*siblings, *(["fused_rms_norm"] if "rms" in thing.__name__ else []), "fused_layer_norm"):
        if name in told_by(getattr(fused_layernorm, function)):
            return f"as in [`{function}`](#{function})"
    raise SystemExit(f"{thing.__name__}: {name} is described nowhere")


def without_norm(name: str) -> str:
    return re.sub("layer_|rms_", "", name)


def sections_of(thing) -> tuple[str, dict[str, str]]:
    """The text in front of the first section, and the sections by name."""
    parts = SECTION.split(inspect.getdoc(thing))
    return parts[0], dict(zip(parts[1::2], parts[2::2], strict=True))


def told_by(thing) -> dict[str, str]:
    told: dict[str, str] = {}
    for names, meaning in entries(sections_of(thing)[1].get("Args", "")):
        told |= dict.fromkeys(names.split(", "), re.split(r"\n(?=\S)", meaning)[0])
    return told


def described(name: str) -> str:
    thing = getattr(fused_layernorm, name)
    (head, sections), tail = sections_of(thing), ""
    for section in ("Args", "Returns", "Raises"):  # unindented text after a section is not part of it
        if section in sections:
            indented = re.match(r"(?:    .*\n?|\n)*", sections[section])[0]
            sections[section], rest = indented, sections[section][len(indented) :]
            tail += rest
    text = f"### `{name}`\n\n{markdown(head).strip()}\n\n"
    if dataclasses.is_dataclass(thing):
        return text + attributes(thing) + "\n"
    if inspect.signature(thing).parameters:
        text += arguments(thing) + "\n"
    if "Returns" in sections:
        text += f"**Returns** {markdown(inspect.cleandoc(sections['Returns']))}\n\n"
    elif not inspect.isclass(thing):
        kind = inspect.signature(thing).return_annotation
        text += f"**Returns** `{kind if isinstance(kind, str) else kind.__name__}`\n\n"
    text += f"{markdown(tail).strip()}\n\n" if tail.strip() else ""
    if "Raises" in sections:
        errors = [[f"`{error}`", cell(when)] for error, when in entries(sections["Raises"])]
        text += table(["error", "when"], errors) + "\n"
    if "Example" in sections:
        text += f"```pycon\n{inspect.cleandoc(sections['Example'])}\n```\n\n"
    return text


def make_page() -> str:
    parts = ["# API reference\n\n<!-- Made by docs/site/api.py from signatures and docstrings. -->\n\n"
             "Which kernel runs a call: [fusions](fusions.md).\n\n"]  # fmt: skip
    for title, names in (("Functions", FUNCTIONS), ("Modules", MODULES), ("Whole models", MODELS)):
        parts += [f"## {title}\n\n", *map(described, names)]
    parts += [f"## Apex names\n\n`fused_layernorm.compat`: {markdown(inspect.getdoc(compat)).strip()}\n\n"]
    parts += ["## The build\n\n", *map(described, BUILD)]
    return re.sub(r"\n{3,}", "\n\n", "".join(parts)).strip() + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "api.md").write_text(make_page())

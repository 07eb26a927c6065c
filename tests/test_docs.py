"""The pages say what is so: quoted messages are in the sources, calls in tables run, every public name is listed."""

import ast
import inspect
import re
import runpy
from pathlib import Path

import pytest
import torch

import fused_layernorm
from fused_layernorm import compat, modules

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FUNCTIONS = [getattr(fused_layernorm, name) for name in fused_layernorm.__all__ if name.startswith("fused_")]


def rows_of(page):
    """The cells of each row of a page's tables, without headings."""
    lines = [line for line in (DOCS / page).read_text().splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in rows if row[0] not in ("from", "what you see")]


NOT_OURS = {"no kernel image is available", "CUDA error: an illegal memory access ..."}


def literal(node):
    """A string of a syntax tree, with "..." for values."""
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "..."


def python_strings():
    for path in [*ROOT.glob("fused_layernorm/**/*.py"), ROOT / "setup.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.JoinedStr, ast.Constant)):
                yield literal(node)


def python_errors():
    """The messages of all errors that the package and its build raise; not those that only hand on what they caught."""
    for path in [*ROOT.glob("fused_layernorm/**/*.py"), ROOT / "setup.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                message = literal(node.exc.args[0])
                if re.search("[a-z]{2}", message):
                    yield message


def cpp_strings():
    """Literals with what is between them: "..." for values."""
    for path in ROOT.glob("csrc/*/*.cpp"):
        text = re.sub(r'"\s*"', "", path.read_text())
        yield re.sub(r'"\s*\+[^";]*\+\s*"', "...", text)


def on_the_page():
    """What the page quotes, each as (the quotation, a pattern for it)."""
    for row in rows_of("troubleshooting.md"):
        for quoted in re.findall(r'"([^"]+)"', row[0]):
            if quoted not in NOT_OURS:
                yield quoted, ".*".join(map(re.escape, quoted.split("...")))


def test_messages_on_the_page_are_ours():
    ours = [*python_strings(), *cpp_strings()]
    quotations = list(on_the_page())
    assert len(quotations) > 40
    missing = [quoted for quoted, pattern in quotations if not any(re.search(pattern, text) for text in ours)]
    assert not missing


def test_our_errors_are_on_the_page():
    patterns = [pattern for _, pattern in on_the_page()]
    errors = list(python_errors())
    assert len(errors) > 40
    assert not [error for error in errors if not any(re.search(pattern, error) for pattern in patterns)]


@pytest.mark.parametrize("row", rows_of("migration.md"), ids=lambda row: f"{row[0]}-{row[2][:40]}")
def test_new_calls_of_the_migration_table_run(row):
    _, _, new = row
    torch.manual_seed(0)
    N, M = 16, 24
    names = {name: getattr(fused_layernorm, name) for name in fused_layernorm.__all__}
    names |= {"torch": torch, "nn": torch.nn, "N": N, "M": M, "eps": 1e-5, "p": 0.1}
    names |= {name: torch.randn(4, 5, N, requires_grad=True) for name in ("x", "residual", "scale", "shift", "gate")}
    names |= {name: torch.nn.Parameter(torch.rand(N) + 1) for name in ("weight", "bias")}
    for parameter in (names["weight"], names["bias"]):
        parameter.main_grad = torch.zeros(N)
    calls = re.findall(r"`([^`]+)`", new)
    for call in calls:
        if call in ("compat",):
            continue
        option = re.fullmatch(r"(\w+)=\S+", call)
        if option:
            assert any(option[1] in inspect.signature(function).parameters for function in FUNCTIONS), call
        else:
            exec(call, dict(names))
    assert calls or "multiply" in new


def test_every_public_name_is_in_the_reference():
    page = (DOCS / "api.md").read_text()
    assert page == runpy.run_path(str(DOCS / "site" / "api.py"))["make_page"](), "python docs/site/api.py makes it anew"
    assert sorted(re.findall(r"^### `(\w+)`", page, re.MULTILINE)) == sorted(fused_layernorm.__all__)
    assert all(getattr(fused_layernorm, name).__doc__ for name in fused_layernorm.__all__) and compat.__doc__


def test_references_of_the_tables_lead_to_the_same_argument():
    """the argument there has this type and default, and a description. Two functions that differ only in the norm refer
    to each other: dropout_p beside a residual is dropout of x, elsewhere of y"""
    page = (DOCS / "api.md").read_text()
    sections = {part.split("`", 2)[1]: part for part in page.split("\n### ")[1:]}
    checked = 0
    for name in (function.__name__ for function in FUNCTIONS):
        own = inspect.signature(getattr(fused_layernorm, name)).parameters
        assert all(f"\n| `{argument}` | " in sections[name] for argument in own)
        for argument, other in re.findall(r"\n\| `(\w+)` \| .*\| as in \[`(\w+)`\]", sections[name]):
            theirs = inspect.signature(getattr(fused_layernorm, other)).parameters[argument]
            assert argument == "shift" or theirs.default == own[argument].default, (name, argument)
            assert argument == "shift" or theirs.annotation == own[argument].annotation, (name, argument)
            assert f"| `{argument}` | " in sections[other] and "as in [" not in row_of(sections[other], argument)
            sibling = name.replace("rms", "?").replace("layer", "rms").replace("?", "layer")
            if (
                sibling in sections
                and argument in sections[sibling]
                and "as in [" not in row_of(sections[sibling], argument)
            ):
                assert other == sibling or "_".join(name.split("_")[1:]) in ("layer_norm", "rms_norm"), (name, argument)
            checked += 1
    assert checked > 50


def row_of(section, argument):
    return next(line for line in section.splitlines() if line.startswith(f"| `{argument}` |"))


@pytest.mark.parametrize(
    "function", [f for f in FUNCTIONS if not f.__name__.endswith("_quant")], ids=lambda f: f.__name__
)
def test_each_function_has_a_module(function):
    """of the same name, with its parameters, that computes what the function does; a function for inference alone has
    none"""
    name = "".join(part.capitalize() for part in function.__name__.split("_")).replace("Rms", "RMS")
    torch.manual_seed(0)
    module = getattr(fused_layernorm, name)(8)
    needed = [p for p in inspect.signature(function).parameters.values() if p.default is inspect.Parameter.empty]
    inputs = [torch.randn(2, 3, 8) for _ in needed]
    found, wanted = module(*inputs), function(*inputs, weight=module.weight, eps=module.eps, normalized_shape=8)
    torch.testing.assert_close(found, wanted)


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 800 and len(text.splitlines()) <= 110
    assert text.count("![") == 1 and text.count("\n|---") == 1, "one plot and one table"
    assert "\n| training step |" in text and not re.search(r"git clone (https?:|git@)", text)
    others = [path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")] if path.name != "README.md"]
    placeholder = re.search(r"git clone (\S+)", text)[1]
    assert text.count(placeholder) == 1 and not any(placeholder in path.read_text() for path in others)


def test_the_first_code_of_the_readme_runs(capsys, monkeypatch):
    """and its model calls our norms, also in eval mode without gradients, where torch's fast path would not"""
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    names = {}
    exec(code, names)
    assert "replaced" in capsys.readouterr().out
    calls, norm = [], modules.fused_layer_norm
    monkeypatch.setattr(modules, "fused_layer_norm", lambda *given, **named: calls.append(1) or norm(*given, **named))
    with torch.no_grad():
        names["model"].eval()(torch.randn(5, 2, 768), torch.randn(5, 2, 768))
    assert len(calls) == 3


@pytest.mark.skipif(fused_layernorm.backend() == "reference", reason="operators need the compiled extension")
def test_the_operators_on_the_page_have_their_schemas():
    page = (DOCS / "pytorch.md").read_text()
    block = re.search(r"```\n(fused_layernorm::.*?)```", page, re.DOTALL)[1]
    quoted = ["".join(schema.split()) for schema in block.split("\n\n")]
    names = ("norm_forward", "norm_backward", "sandwich_norm", "norm_quant", "dropout_mask")
    operators = [getattr(torch.ops.fused_layernorm, name) for name in names]
    assert quoted == ["".join(str(operator.default._schema).split()) for operator in operators]


def test_public_functions_are_annotated():
    for function in FUNCTIONS:
        signature = inspect.signature(function)
        annotations = [parameter.annotation for parameter in signature.parameters.values()]
        assert inspect.Signature.empty not in (*annotations, signature.return_annotation), function


def test_overloads_agree_with_the_functions():
    """All arguments of the function, of the same kinds, types and defaults, but for the one that decides the result."""
    tree = ast.parse((ROOT / "fused_layernorm" / "functional.py").read_text())
    options = {}  # of each TypedDict: name and type
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Options"):
            own = {field.target.id: ast.unparse(field.annotation) for field in node.body}
            options[node.name] = options.get(node.bases[0].id, {}) | own
    overloads = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list]
    assert len({node.name for node in overloads}) == 4
    for node in overloads:
        parameters = inspect.signature(getattr(fused_layernorm, node.name)).parameters
        by_position, by_keyword = (
            {argument.arg: ast.unparse(argument.annotation) for argument in arguments}
            for arguments in (node.args.args, node.args.kwonlyargs)
        )
        by_keyword |= options[node.args.kwarg.annotation.slice.id]
        wanted = {name: parameter.annotation for name, parameter in parameters.items()}
        assert list(by_position) == [
            name for name, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        found = by_position | by_keyword
        assert found.keys() == wanted.keys(), node.name
        decisive = "residual" if "adaptive" in node.name else "return_dropout_mask"
        assert found | {decisive: None} == wanted | {decisive: None}, node.name
        with_default = [*by_position][len(by_position) - len(node.args.defaults) :]
        defaults = dict(zip(with_default, node.args.defaults, strict=True))
        defaults |= {
            argument.arg: default
            for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            if default is not None
        }
        assert all(ast.literal_eval(default) == parameters[name].default for name, default in defaults.items())

"""Two hooks into Inductor (torch.compile), installed when the first norm of this library is traced.

- A pass over the joint graph of forward and backward, before Inductor splits it. It folds an addition next to one of
  our operators into that operator: `add -> norm_forward` becomes a norm with a residual, `norm_forward -> add` a norm
  to whose result a residual is added, `norm_backward -> add` a backward with the residual's gradient as input. A norm
  of such a sum joins the operator of the norm before it. A modulation, y * (1 + scale) + shift, or an activation of y
  becomes part of the norm, in training also of its backward. So does the gate of a residual, residual + gate * x. Casts
  around a float32 residual stream are folded too, and copies of a gated norm's gate. Under CUDA graphs, LayerNorm of
  few short rows is left to Inductor at inference.
- Lowerings: the Python code that Inductor generates calls the extension, not the dispatcher. cpp_wrapper, AOTInductor
  and torch.export keep the operators.

`counters` counts the folds in this process: "residual", "added", "sandwich", "grad_residual", "modulation", "gate",
"grad_gate", "activation", "cast", "copy" and "few_rows" (graphs from Inductor's cache were folded earlier and are not
counted).
`disable()` and `enable()` turn both hooks off and on for graphs that are compiled later; FUSED_LAYERNORM_FOLD=0
disables them at import.

The hooks use private APIs of torch. If torch rejects them, there is one warning, and graphs stay unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import sys
import warnings
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from .. import _ops, reference
from .._build import toolchain

counters: Counter[str] = Counter()

_aten = torch.ops.aten
_ADD, _MUL, _CAST = _aten.add.Tensor, _aten.mul.Tensor, torch.ops.prims.convert_element_type.default
_VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)
_ALIASES = (_aten.alias.default, _aten.detach.default)
_NARROW = (torch.float16, torch.bfloat16)
# The operators of aten whose results Inductor writes to memory as they are; it fuses what it generates itself.
_KERNELS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "_grouped_mm")

_FEW_ROWS_BYTES, _SHORT_ROW = 2 << 20, 1024  # see _leave_few_rows

_is_enabled = toolchain.flag("FUSED_LAYERNORM_FOLD") is not False


# ---- on and off ------------------------------------------------------------------------------------------------------


def enable() -> None:
    """Enable both hooks for graphs that are compiled later (the default)."""
    global _is_enabled
    _is_enabled = True


def disable() -> None:
    """Disable both hooks for graphs that are compiled later: each norm is one operator, called by the dispatcher."""
    global _is_enabled
    _is_enabled = False
    config = sys.modules.get("torch._inductor.config")
    present = getattr(config, "joint_custom_pre_pass", None)
    if hasattr(present, "passes_before_ours"):
        config.joint_custom_pre_pass = present.passes_before_ours


def install() -> None:
    """Add the pass to Inductor's configuration, after the user's pass. The operators' fake implementations call this;
    it returns at once if Inductor is not loaded or the pass is installed."""
    config = sys.modules.get("torch._inductor.config")
    if config is None or not _is_enabled:
        return
    try:
        present = config.joint_custom_pre_pass
        if not hasattr(present, "passes_before_ours"):
            config.joint_custom_pre_pass = _pass_class()(present)
    except Exception as error:
        _give_up(error)


def _give_up(error: Exception) -> None:
    disable()
    warnings.warn(
        f"torch {torch.__version__} does not take fused_layernorm's hooks into Inductor ({error!r}): compiled graphs "
        "are right, but residuals are added outside the norms. FUSED_LAYERNORM_FOLD=0 silences this.",
        RuntimeWarning,
        stacklevel=3,
    )


@functools.cache
def _pass_class() -> type:
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class FoldNorms(CustomGraphPass):
        """The earlier passes, then ours."""

        def __init__(self, present):
            self.passes_before_ours = present
            self.others = () if present is None else present if isinstance(present, (list, tuple)) else (present,)

        def __call__(self, graph: Graph) -> None:
            for other in self.others:
                other(graph)
            if _is_enabled and any(_is(node, _ops.norm_forward, _ops.norm_backward) for node in graph.nodes):
                try:
                    if _ops.calls:
                        _lower_to_direct_calls()
                except Exception as error:
                    return _give_up(error)
                fold(graph)

        def uuid(self) -> Any:
            """Part of the keys of Inductor's caches, which do not include the code that the lowerings generate."""
            theirs = tuple(p.uuid() if isinstance(p, CustomGraphPass) else None for p in self.others)
            schemas = (str(_ops.norm_forward._schema), str(_ops.norm_backward._schema))
            return None if None in theirs else (get_hash_for_files((__file__,)), _is_enabled, schemas, theirs)

    return FoldNorms


# ---- the pass --------------------------------------------------------------------------------------------------------


def fold(graph: Graph) -> None:
    """Fold the neighbours of our operators in `graph`, in place. A node with other readers keeps its value."""
    writes = [node for node in graph.nodes if _may_write(node)]
    for node in graph.find_nodes(op="call_function", target=_ops.norm_forward):
        with contextlib.suppress(_NoValue):
            if _is_positional(node) and not _leave_few_rows(graph, node):
                with_residual = _fold_residual(graph, node, writes)
                norm = with_residual or node
                _fold_cast(graph, norm)
                norm = _fold_modulation(graph, norm, writes) or norm
                _fold_activation(graph, norm, writes)
                _fold_cast(graph, norm)
                with_residual = with_residual or _fold_residual(graph, norm, writes, is_gated=True)
                if with_residual is None and not _fold_sandwich(graph, norm, writes):
                    _fold_added(graph, norm, writes)
                _fold_copy(graph, norm, writes)
    for node in graph.find_nodes(op="call_function", target=_ops.norm_backward):  # also those of _fold_modulation
        with contextlib.suppress(_NoValue):
            if _is_positional(node):
                _fold_grad_gate(graph, _fold_grad_residual(graph, node, writes) or node, writes)


def _has_cuda_graph(node: Node) -> bool:
    """Whether Inductor records the node in a CUDA graph, as in mode="reduce-overhead"."""
    return _val(node).is_cuda and getattr(torch._inductor.config.triton, "cudagraphs", False)


def _leave_few_rows(graph: Graph, norm: Node) -> bool:
    """Replaces a LayerNorm of few short rows by its formula, if it has no backward and is part of a CUDA graph, where
    only GPU time counts. Inductor's kernel holds up to _SHORT_ROW columns in registers and is compiled for given sizes
    and dtypes, so it is the shorter one. Models with LayerNorm of 768 and 1024 columns ran at 0.95 to 1.00 of the speed
    of Inductor's norms with 8 to 512 rows in our kernel, and at 0.98 to 1.02 with 2048 rows."""
    x, residual, gate, weight, bias, philox, *given = norm.args
    options, results, value = reference.Options(*given), _results(norm), _val(x)
    sizes = (value.numel(), math.prod(value.shape[-options.normalized_ndim :]))
    if (
        not _has_cuda_graph(x)
        or not _is_plain(options._replace(out_dtype=None))
        or weight is None
        or any(t is not None for t in (residual, gate, philox))
        or results is None
        or any(part.users for index, part in results.items() if index != 0)
        or not all(isinstance(n, int) for n in sizes)
        or sizes[0] * value.element_size() > _FEW_ROWS_BYTES
        or sizes[1] > _SHORT_ROW
    ):
        return False
    formula = _formula(norm)
    (y,) = formula.output_node().args[0]
    if not _same_layout(_val(y), norm.meta["val"][0]):
        return False
    tensors = (t for t in norm.args if isinstance(t, Node))
    with graph.inserting_before(norm):
        (y,) = graph.graph_copy(formula, dict(zip(formula.find_nodes(op="placeholder"), tensors, strict=True)))
    _replace(graph, norm, results, {0: y})
    counters["few_rows"] += 1
    return True


def _fold_residual(graph: Graph, norm: Node, writes: list[Node], is_gated: bool = False) -> Node | None:
    """norm(a + b) becomes the norm of a with the residual b, and a + b its second result. Returns the new node.
    With is_gated, a is the product gate * x, which the norm computes too."""
    x, residual, gate, weight, bias, philox, *given = norm.args
    options = reference.Options(*given)
    if any(t is not None for t in (residual, gate, philox, options.residual_dtype)):
        return None
    z, views = x, []  # x may be a view of the sum with the same rows
    while _is(z, *_VIEWS) and _same(_val(z).shape[-given[0] :], _val(z.args[0]).shape[-given[0] :]):
        views.append(z)
        z = z.args[0]
    if views and any(t is not None and _val(t).dim() != options.normalized_ndim for t in (weight, bias)):
        return None
    terms = _terms(z)
    if terms is None or _region(z) != _region(norm) or not (is_gated or all(map(_is_in_memory, terms))):
        return None
    dtype, results = _val(z).dtype, _results(norm)
    stream = functools.partial(_gated_stream, norm) if is_gated else _stream
    found = stream(*terms, dtype) or stream(*terms[::-1], dtype)
    if found is None or results is None or (1 in results and results[1].users):
        return None
    if views and 2 in results and not all(_is(user, _ops.norm_backward) for user in results[2].users):
        return None  # stats would have another shape
    # The norm runs in the place of the sum, or after it if its parameters are computed later.
    place = max([z, *(node for node in norm.all_input_nodes if node is not x)])
    sources = dict.fromkeys((*terms, *map(_uncast, terms)))
    if any(user <= place for user in z.users) or any(min(z, *sources) < write < norm for write in writes):
        return None

    y_dtype = options.out_dtype or dtype
    options = options._replace(
        out_dtype=None if y_dtype == _val(found[0]).dtype else y_dtype,
        residual_dtype=None if dtype == _val(found[1]).dtype else dtype,
    )
    if _garbles_dtypes() and (options.out_dtype or options.residual_dtype):
        return None
    new = _insert_behind(place, norm, _ops.norm_forward, (*found, weight, bias, None, *options))
    if not _same_layout(new.meta["val"][1], _val(z)):  # such as a sum of two transposed tensors
        graph.erase_node(new)
        return None
    y, z_out, stats = _unpack(new)
    for view in reversed(views):
        with graph.inserting_before(norm):
            y = _call(graph, norm, view.target, (y, *view.args[1:]))
    z.replace_all_uses_with(z_out)
    _replace(graph, norm, results, {0: y, 2: stats})
    _erase_unread(graph, z, *sources, y, z_out, stats)
    counters["gate" if is_gated else "residual"] += 1
    return new


def _fold_added(graph: Graph, norm: Node, writes: list[Node]) -> None:
    """y + residual, where y is only read by the sum, becomes the result of a norm with adds_y. The sum is rounded once,
    as in the kernels that Inductor generates."""
    x, residual, gate, weight, bias, philox, *given = norm.args
    options, results = reference.Options(*given), _results(norm)
    others = (residual, gate, philox, options.residual_dtype, options.activation or None)
    if results is None or 0 not in results or any(t is not None for t in others) or options.rounds_x_hat:
        return
    y = results[0]
    total, dtype = _only_user(y), _val(x).dtype
    terms = _terms(total)
    if terms is None or _region(total) != _region(norm):
        return
    other = terms[1] if terms[0] is y else terms[0]
    if (
        any(_val(t).dtype != dtype for t in (y, other, total))
        or not _is_in_memory(other)
        or not _is_one_kernel(x, options)
    ):
        return
    place = max(norm, other)
    if any(user <= place for part in results.values() for user in part.users):
        return
    if any(min(norm, other) < write < total for write in writes):
        return
    options = options._replace(adds_y=True, out_dtype=None)
    new = _insert_behind(place, norm, _ops.norm_forward, (x, other, None, weight, bias, None, *options))
    if not _same_layout(new.meta["val"][0], _val(total)):
        graph.erase_node(new)
        return
    parts = _unpack(new)
    total.replace_all_uses_with(parts[0])
    graph.erase_node(total)
    _replace(graph, norm, results, dict(enumerate(parts)))
    _erase_unread(graph, *parts)
    counters["added"] += 1


def _fold_sandwich(graph: Graph, norm: Node, writes: list[Node]) -> bool:
    """RMSNorm of z, where z = residual + RMSNorm(x) is one operator: both norms become sandwich_norm."""
    z, _, _, weight, _, _, *given = norm.args
    before = z.args[0] if _is(z, operator.getitem) and z.args[1] == 0 else None
    if not _is(before, _ops.norm_forward) or not _is_positional(before):
        return False
    x, residual, _, post_weight, _, _, *given_before = before.args
    options, earlier = reference.Options(*given), reference.Options(*given_before)
    results, results_before = _results(norm), _results(before)
    ndim = earlier.normalized_ndim

    def is_plain(one: reference.Options, node: Node) -> bool:
        no_tensors = node.args[2] is node.args[4] is node.args[5] is None
        return one.normalized_ndim == ndim and _is_plain(one, is_rms_norm=True) and no_tensors

    if (
        results is None
        or results_before is None
        or norm.args[1] is not None
        or not is_plain(options._replace(out_dtype=None), norm)
        or not earlier.adds_y
        or not is_plain(earlier._replace(adds_y=False), before)
        or any(t is not None and _val(t).dim() != ndim for t in (weight, post_weight))
        or any(_val(t).dtype != _val(x).dtype for t in (residual, z))
        or options.out_dtype not in (None, _val(x).dtype)
        or _region(before) != _region(norm)
        or not _is_one_kernel(x, earlier)
    ):
        return False
    place = max([before, *([weight] if weight is not None else [])])
    if any(user <= place for part in results_before.values() for user in part.users):
        return False
    if any(min([before, *before.all_input_nodes]) < write < norm for write in writes):
        return False
    new = _insert_behind(place, norm, _ops.sandwich_norm, (
        x, residual, post_weight, weight, ndim, earlier.eps, options.eps, earlier.weight_offset,
        options.weight_offset,
    ))  # fmt: skip
    y, z_out, stats, next_stats = _unpack(new)
    _replace(graph, norm, results, {0: y, 2: next_stats})
    _replace(graph, before, results_before, {0: z_out, 2: stats})
    _erase_unread(graph, y, z_out, stats, next_stats)
    counters["sandwich"] += 1
    return True


def _fold_modulation(graph: Graph, norm: Node, writes: list[Node]) -> Node | None:
    """y * (1 + scale) + shift, where y has no weight and no bias, and rows share scale and shift, becomes y of a norm
    with this weight and bias. In training norm_backward also computes the gradients of scale and shift. Returns the new
    node. Every factor is a weight; without a sum there is no bias."""
    x, residual, gate, weight, bias, philox, *given = norm.args
    options, results = reference.Options(*given), _results(norm)
    others = (gate, weight, bias, philox, options.activation or None)
    if results is None or 0 not in results or any(t is not None for t in others):
        return None
    if options.adds_y or options.rounds_x_hat or options.per_head:
        return None
    y = results[0]
    product = min(y.users, default=None)
    factor = _other_operand(product, _MUL, y)
    if factor is None or not _is_shared(factor, x, options):
        return None
    total = _only_user(product)
    shift = _other_operand(total, _ADD, product)
    if shift is None or not _is_shared(shift, x, options) or not _same(_val(shift).shape, _val(factor).shape):
        total, shift = product, None
    found = _gradients_of_modulation(results, product, factor, shift)
    if found is None:
        return None
    is_one_more = _is(factor, _ADD) and not factor.kwargs and isinstance(factor.args[0], Node) and factor.args[1] == 1
    scale, offset = (factor.args[0], 1.0) if is_one_more else (factor, 0.0)
    dtype = _parameter_dtype(scale, shift, x, found.backward)
    out_dtype = None if _val(total).dtype == _val(x).dtype else _val(total).dtype
    if (
        dtype is None
        or not _is_one_kernel(x, options, found.backward)
        or not _is_read_by_kernel(total, _CAST)
        or not _same(_val(total).stride(), _val(y).stride())
        or any(_region(node) != _region(norm) for node in (product, total))
        or (out_dtype and _garbles_dtypes())
    ):
        return None
    parameters = [t for t in (scale, shift) if t is not None]
    place, end = max(norm, *parameters), found.backward or total
    if any(user <= place for part in results.values() for user in part.users if user is not product):
        return None
    if any(min(norm, factor) < write < end for write in writes) or not found.can_move(total):
        return None

    for i, parameter in enumerate(parameters):
        if _val(parameter).dtype != dtype:
            place = parameters[i] = _insert_behind(place, norm, _CAST, (parameter, dtype))
    options = options._replace(weight_offset=offset, out_dtype=out_dtype)
    scale, shift = (*parameters, None)[:2]
    new = _insert_behind(place, norm, _ops.norm_forward, (x, residual, None, scale, shift, None, *options))
    parts = _unpack(new)
    if found.backward is not None:
        found.replace(graph, scale, offset, parts[2])
    total.replace_all_uses_with(parts[0])
    _erase_unread(graph, *dict.fromkeys((total, product, factor)))
    _replace(graph, norm, results, dict(enumerate(parts)))
    _erase_unread(graph, *parts)
    counters["modulation"] += 1
    return new


class _ModulationGradients(NamedTuple):
    """The nodes of backward that read y, and those that make norm_backward's grad_output of the gradient `grad`."""

    backward: Node | None = None  # norm_backward; without one there are no gradients
    grad: Any = None  # of y * factor + shift
    of_y: tuple[Node, ...] = ()  # grad * factor, and a cast of it
    of_factor: tuple[Node, ...] = ()  # grad * y, and its sum
    of_shift: tuple[Node, ...] = ()  # the sum of grad

    def can_move(self, total: Node) -> bool:
        """Whether backward can run once its inputs exist, before all readers of the gradients."""
        if self.backward is None:
            return True
        inputs = [self.grad, *(node for node in self.backward.all_input_nodes if node not in self.of_y)]
        for node in inputs:
            _val(node)
        place = max(total, *inputs)
        gradients = (*self.backward.users, *self.of_factor[1:], *self.of_shift)
        return not any(user <= place for node in gradients for user in node.users)

    def replace(self, graph: Graph, scale: Node, offset: float, stats: Node) -> None:
        """Let backward read the parameters, and compute their gradients."""
        _, grad_residual_out, z, _, x, gate, _, _, philox, *given = self.backward.args
        options, wanted = _ops._split(given)
        dtypes = [_val(nodes[-1]).dtype if nodes else None for nodes in (self.of_factor, self.of_shift)]
        wanted = wanted._replace(grad_weight_dtype=dtypes[0], grad_bias_dtype=dtypes[1])
        arguments = (self.grad, grad_residual_out, z, stats, x, gate, scale, None, philox)
        place = max(node for node in arguments if node is not None)
        given = (*options._replace(weight_offset=offset), *wanted)
        parts = _unpack(_insert_behind(place, self.backward, _ops.norm_backward, (*arguments, *given)))
        for nodes, part in zip((self.of_factor, self.of_shift), parts[3:], strict=True):
            if nodes:
                nodes[-1].replace_all_uses_with(part)
        _replace(graph, self.backward, _results(self.backward), dict(enumerate(parts)))
        _erase_unread(graph, *self.of_y[::-1], *self.of_factor[::-1], *self.of_shift, *parts)


def _gradients_of_modulation(
    results: dict[int, Node], product: Node, factor: Node, shift: Node | None
) -> _ModulationGradients | None:
    """None: y or the statistics have other readers."""
    y, others = results[0], [user for user in results[0].users if user is not product]
    is_known, backward = _backward_of(results)
    if backward is None:
        return _ModulationGradients() if is_known and not others else None
    of_y = (backward.args[0],)
    if _is(of_y[0], _CAST):
        of_y = (of_y[0].args[0], of_y[0])
    grad, parts = _other_operand(of_y[0], _MUL, factor), _results(backward)
    if grad is None or not _same(_val(grad).shape, _val(y).shape) or parts is None or any(i in parts for i in (3, 4)):
        return None
    of_factor = ()
    if others:
        of_factor = (others[0], _only_user(others[0]))
        if (
            len(others) > 1
            or _other_operand(others[0], _MUL, y) is not grad
            or not _is_sum(of_factor[1], _val(factor).shape)
        ):
            return None
    of_shift = () if shift is None else tuple(user for user in grad.users if _is_sum(user, _val(shift).shape))[:1]
    return _ModulationGradients(backward, grad, of_y, of_factor, of_shift)


def _parameter_dtype(scale: Node, shift: Node | None, x: Node, backward: Node | None) -> torch.dtype | None:
    """A dtype of weight and bias beside x, in forward and backward, to which scale and shift are cast without loss."""
    given = [_val(t).dtype for t in (scale, shift) if t is not None]
    dtypes = {_val(x).dtype} if backward is None else {_val(x).dtype, _ops._split(backward.args[9:])[1].x_dtype}
    candidates = list(dtypes) if len(dtypes) == 1 else []
    if torch.float64 not in dtypes:
        candidates.append(torch.float32)
    fits = (c for c in candidates if all(d in reference.DTYPES and torch.promote_types(d, c) == c for d in given))
    return next(fits, None)


def _fold_activation(graph: Graph, norm: Node, writes: list[Node]) -> None:
    """activation(y) becomes y of the norm, if nothing else reads y but the derivative in backward, which norm_backward
    then computes."""
    x, residual, gate, weight, bias, philox, *given = norm.args
    options, results = reference.Options(*given), _results(norm)
    others = (residual, gate, philox, options.residual_dtype, options.activation or None)
    if results is None or 0 not in results or any(t is not None for t in others):
        return
    y, dtype = results[0], _val(x).dtype
    is_known, backward = _backward_of(results)
    if (
        not is_known
        or dtype not in (*_NARROW, torch.float32)
        or _val(y).dtype != dtype
        or options.adds_y
        or options.rounds_x_hat
        or any(t is not None and _val(t).dim() != options.normalized_ndim for t in (weight, bias))
        or any(user.op == "output" or _is_kernel(user) or _is(user, *_VIEWS) for user in y.users)
        or not _is_one_kernel(x, options, backward)
    ):
        return
    found = _find_activation(y, backward)
    if found is None:
        return
    index, total, grad, nodes = found
    if (
        _region(total) != _region(norm)
        or not _is_read_by_kernel(total)
        or (backward is not None and not (_val(grad).dtype == dtype and _same(_val(grad).shape, _val(y).shape)))
        or any(norm < write < (backward or total) for write in writes)
    ):
        return
    norm.args = (*norm.args[:6], *options._replace(activation=index))
    norm.meta.pop("eager_input_vals", None)
    total.replace_all_uses_with(y)
    if backward is not None:
        options, wanted = _ops._split(backward.args[9:])
        tensors = (grad, *backward.args[1:7], bias, backward.args[8])
        backward.args = (*tensors, *options._replace(activation=index), *wanted)
        backward.meta.pop("eager_input_vals", None)
    _erase_unread(graph, *sorted(nodes, reverse=True))
    counters["activation"] += 1


def _find_activation(y: Node, backward: Node | None) -> tuple[int, Node, Node | None, set[Node]] | None:
    """The activation of y, its result, the result's gradient, and all nodes between these, if nothing else reads y."""
    value = _val(y)
    for index in range(1, reference.ACTIVATION_NAMES.index("sigmoid")):
        y_pattern, grad_pattern, *_, output = _activation_pattern(index, value.dtype, value.device).nodes
        result, grad_y = output.args[0]
        ends, step = [y], y_pattern
        while step is not result:
            step = next(iter(step.users))
            ends = [user for end in ends for user in end.users if user.target == step.target]
        for end in sorted(set(ends)):
            bound = {y_pattern: y}
            if not _matches(result, end, bound) or (backward and not _matches(grad_y, backward.args[0], bound)):
                continue
            grad = bound.get(grad_pattern)
            nodes = set(bound.values()) - {y, grad}
            computed = [node for node in (y, *nodes) if node is not end and node.all_input_nodes]
            readers = {user for node in computed for user in node.users}
            if readers <= nodes | {backward}:
                return index, end, grad, nodes
    return None


@functools.cache
def _activation_pattern(index: int, dtype: torch.dtype, device: torch.device) -> Graph:
    """The graph that Inductor's decompositions make of an activation: from y and the gradient of the result to the
    result and the gradient of y."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
    from torch.fx.experimental.proxy_tensor import make_fx

    def both(y, grad):
        result = reference.ACTIVATIONS[index][1](y)
        return result, *torch.autograd.grad(result, y, grad)

    modes = (
        torch._guards.tracing(None), unset_fake_temporarily(), FakeTensorMode(), torch.inference_mode(False),
        torch.enable_grad(), torch.autocast(device.type, enabled=False),
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        y = torch.empty(2, 3, dtype=dtype, device=device, requires_grad=True)
        return make_fx(both, select_decomp_table())(y, torch.empty_like(y)).graph


def _matches(pattern: Node, node: Any, bound: dict[Node, Node]) -> bool:
    """Whether `node` is computed like `pattern`, from the nodes to which `bound` maps the pattern's placeholders. Adds
    the nodes between to `bound`."""
    while _is(pattern, *_ALIASES):
        pattern = pattern.args[0]
    while _is(node, *_ALIASES):
        bound[node] = node
        node = node.args[0]
    if pattern in bound or pattern.op == "placeholder":
        return bound.setdefault(pattern, node) is node
    if (
        not _is(node, pattern.target)
        or len(node.args) != len(pattern.args)
        or node.kwargs.keys() != pattern.kwargs.keys()
    ):
        return False
    bound[pattern] = node
    pairs = [*zip(pattern.args, node.args, strict=True), *((t, node.kwargs[k]) for k, t in pattern.kwargs.items())]
    return all(
        _matches(p, n, bound) if isinstance(p, Node) and isinstance(n, Node) else type(p) is type(n) and p == n
        for p, n in pairs
    )


def _fold_copy(graph: Graph, norm: Node, writes: list[Node]) -> None:
    """The gate of a gated norm, columns of a projection that are copied only to become a matrix, is read in place:
    x and y get its shape. Not in training: backward would keep the projection, which is larger than the copy."""
    x, residual, gate, weight, bias, _, *given = norm.args
    options, results = reference.Options(*given), _results(norm)
    copy = gate.args[0] if _is(gate, *_VIEWS) else None
    if residual is not None or not _is(copy, _aten.clone.default) or results is None:
        return
    source, sizes = copy.args[0], list(_val(x).shape[-options.normalized_ndim :])
    shape = [-1 if isinstance(n, torch.SymInt) else n for n in _val(source).shape]
    if (
        any(part.users for index, part in results.items() if index != 0)
        or _only_user(copy) is not gate
        or _only_user(gate) is not norm
        or not _val(x).dim() - 1 == options.normalized_ndim < len(shape)  # then x is a view of any such shape
        or shape.count(-1) > 1
        or not all(isinstance(n, int) for n in sizes)
        or not all(t is None or _is_of_columns(t, x, options) for t in (weight, bias))
        or not _has_rows(_val(source), sizes)
        or _region(copy) != _region(norm)
        or any(source < write < norm for write in writes)
    ):
        return
    x = _insert_behind(max(x, source, *norm.all_input_nodes), norm, _aten.view.default, (x, shape))
    new = _insert_behind(x, norm, _ops.norm_forward, (x, None, source, weight, bias, None, *given))
    parts = _unpack(new)
    _replace(graph, norm, results, {0: _insert_behind(parts[-1], norm, _aten.view.default, (parts[0], [-1, *sizes]))})
    _erase_unread(graph, gate, copy, *parts)
    counters["copy"] += 1


def _has_rows(value: torch.Tensor, sizes: list[int]) -> bool:
    """Whether the kernels read rows of these sizes in place: in 16-byte vectors, with one stride within groups of rows
    and one between them (RowStrides in csrc/norm_params.h)."""
    first, contiguous = value.dim() - len(sizes), torch.empty(sizes, device="meta").stride()
    if not _same(value.shape[first:], sizes) or not _same(value.stride()[first:], contiguous):
        return False
    strides, merged = [], None  # of what can be merged to one dimension, the innermost first
    for n, stride in zip(reversed(value.shape[:first]), reversed(value.stride()[:first]), strict=True):
        if isinstance(n, int) and n == 1:
            continue
        if merged is None or not _same((stride,), (merged,)):
            strides.append(stride)
        merged = n * stride
    vector = 16 // value.element_size()
    return len(strides) <= 2 and all(isinstance(n, int) and n % vector == 0 for n in (*strides, value.storage_offset()))


def _is_one_kernel(x: Node, options: reference.Options, backward: Node | None = None, short_row: int = 8192) -> bool:
    """Whether the stage is part of the norm's kernel on CUDA, and of the kernel of backward: rows of whole 16-byte
    vectors, of at most 32 KiB, or `short_row` bytes in a backward without clusters."""
    value = _val(x)
    sizes = value.shape[-options.normalized_ndim :]
    if not all(isinstance(n, int) for n in sizes):
        return False
    row_bytes = math.prod(sizes) * value.element_size()
    has_short_rows = backward is not None and value.is_cuda and not _ops._has_clusters(value.device)
    return row_bytes % 16 == 0 and row_bytes <= (short_row if has_short_rows else 32768)


def _stream(a: Node, b: Node, dtype: torch.dtype) -> tuple[Node, Node, Node | None] | None:
    """(x, residual, no gate) of a norm of a + b, a sum in `dtype`, if the operator accepts a as x and b as residual."""
    a, b = _uncast(a), _uncast(b)
    is_x = _val(a).dtype == dtype or (dtype == torch.float32 and _val(a).dtype in _NARROW)
    return (a, b, None) if is_x and _val(b).dtype in (_val(a).dtype, dtype) else None


def _gated_stream(norm: Node, a: Node, b: Node, dtype: torch.dtype) -> tuple[Node, Node, Node] | None:
    """(x, residual, gate) of a norm of a + b, if a is gate * x, which nothing else reads, rows share the gate
    (LayerScale: all rows), and one kernel takes the call."""
    options, found = reference.Options(*norm.args[6:]), _stream(a, b, dtype)
    if found is None:
        return None
    product, residual, _ = found
    if (
        any(_only_user(node) is None or _region(node) != _region(norm) for node in (a, product))
        or _val(residual).dtype != dtype
        or not _is_in_memory(residual)
        or any((options.activation, options.per_head, options.rounds_x_hat))
    ):
        return None
    for gate in product.args:
        x = _other_operand(product, _MUL, gate)
        if (
            x is not None
            and isinstance(gate, Node)
            and _is_in_memory(x)
            and _same(_val(x).shape, _val(residual).shape)
            and _val(x).dtype == _val(gate).dtype == (options.out_dtype or dtype)
            and (_is_shared(gate, x, options) or _is_of_columns(gate, x, options))
            and all(t is None or _same(_val(t).shape, _val(gate).shape) for t in norm.args[3:5])
            and _has_gate_kernel(x, residual, options)
        ):
            return x, residual, gate
    return None


def _has_gate_kernel(x: Node, z: Node, options: reference.Options, backward: Node | None = None) -> bool:
    """_is_one_kernel for z = residual + gate * x. Its backward without clusters takes at most 2048 columns."""
    has_kernel = _val(x).dtype in (*_NARROW, torch.float32)
    return has_kernel and all(_is_one_kernel(t, options, backward, 2048 * _val(t).element_size()) for t in (x, z))


def _fold_cast(graph: Graph, norm: Node) -> None:
    """A float32 y that is only read through a cast to 16 bits becomes the result of that cast."""
    y = (_results(norm) or {}).get(0)
    casts = [] if y is None else list(y.users)
    if not casts or _val(y).dtype != torch.float32 or not all(_is(u, _CAST) for u in casts):
        return
    dtype = _val(casts[0]).dtype
    if dtype not in _NARROW or any(_val(u).dtype != dtype or _region(u) != _region(norm) for u in casts):
        return
    if _garbles_dtypes() and _val(norm.args[0]).dtype != dtype:
        return
    options = reference.Options(*norm.args[6:])
    options = options._replace(out_dtype=None if _val(norm.args[0]).dtype == dtype else dtype)
    norm.args = (*norm.args[:6], *options)
    norm.meta.pop("eager_input_vals", None)
    norm.meta["val"] = (_val(casts[0]), *norm.meta["val"][1:])
    y.meta |= {"val": _val(casts[0]), "tensor_meta": casts[0].meta.get("tensor_meta")}
    for cast in casts:
        cast.replace_all_uses_with(y)
        graph.erase_node(cast)
    counters["cast"] += 1


def _fold_grad_residual(graph: Graph, backward: Node, writes: list[Node]) -> Node | None:
    """grad_x + other becomes grad_x of a backward with grad_residual_out `other`, if only the sum is read. Returns
    the new node."""
    if (narrow := _uncast(backward.args[0])) < backward.args[0] and not any(narrow < w < backward for w in writes):
        backward.update_arg(0, narrow)  # the kernel reads any dtype
        backward.meta.pop("eager_input_vals", None)
    grad_output, grad_residual_out, z, stats, x, gate, weight, bias, philox, *given = backward.args
    options, wanted = _ops._split(given)
    is_plain = all(t is None for t in (grad_residual_out, x, gate, philox, options.residual_dtype))
    results = _results(backward)
    if not is_plain or results is None or 0 not in results or not wanted.wants_x or wanted.z_is_y:
        return None
    grad, views = results[0], []
    while _is(user := _only_user(grad), *_VIEWS) and _same(_val(user).shape[-given[0] :], _val(z).shape[-given[0] :]):
        views.append(user)
        grad = user
    total = _only_user(grad)
    terms = _terms(total)
    if terms is None or _region(total) != _region(backward) or _val(total).dtype != _val(grad).dtype:
        return None
    other = _uncast(terms[1] if terms[0] is grad else terms[0])
    shape = z.args[1] if _is(z, *_VIEWS) else list(_val(z).shape)
    if not _same_layout(_val(grad), _val(total)) or (views and any(isinstance(n, torch.SymInt) for n in shape)):
        return None
    # It runs once the other gradient exists; readers of its other results must come later.
    place = max(backward, other)
    if any(user <= place for part in results.values() for user in part.users):
        return None
    if any(min(backward, *terms) < write < total for write in writes):
        return None

    # In a float32 stream the gradient of a 16-bit term is the rounded gradient.
    dtype = _val(z).dtype
    users = list(total.users)
    casts = [u for u in users if not views and dtype == torch.float32 and _is(u, _CAST) and _val(u).dtype in _NARROW]
    casts = [u for u in casts if _val(u).dtype == _val(casts[0]).dtype]
    wanted = wanted._replace(
        x_dtype=_val(casts[0]).dtype if casts else dtype,
        grad_residual_dtype=dtype if casts and len(casts) < len(users) else None,
    )
    if views:
        place = other = _insert_behind(place, backward, _aten.reshape.default, (other, shape))
    arguments = (grad_output, other, z, stats, None, None, weight, bias, None)
    options = options._replace(residual_dtype=dtype)
    new = _insert_behind(place, backward, _ops.norm_backward, (*arguments, *options, *wanted))
    parts = _unpack(new)
    for cast in casts:
        cast.replace_all_uses_with(parts[0])
        graph.erase_node(cast)
    if views:
        views[0].update_arg(0, parts[0])
    total.replace_all_uses_with(views[-1] if views else parts[1] if wanted.grad_residual_dtype else parts[0])
    graph.erase_node(total)
    _replace(graph, backward, results, dict(enumerate(parts)))
    _erase_unread(graph, *parts)
    counters["grad_residual"] += 1
    return new


def _fold_grad_gate(graph: Graph, backward: Node, writes: list[Node]) -> None:
    """The products of grad_z with gate and, summed over the rows that share it, with x become the gradients of x and
    gate of a backward, if z = residual + gate * x is forward's second result."""
    grad_output, grad_residual_out, z, stats, _, present_gate, weight, bias, philox, *given = backward.args
    options, wanted = _ops._split(given)
    forward, results = z.args[0] if _is(z, operator.getitem) and z.args[1] == 1 else None, _results(backward)
    if not _is(forward, _ops.norm_forward) or not _is_positional(forward) or results is None or 0 not in results:
        return
    x, _, gate, forward_weight, *_ = forward.args
    if gate is None or present_gate is not None or philox is not None or weight is not forward_weight:
        return
    dtype, z_dtype, grad = _val(x).dtype, _val(z).dtype, results[0]
    if (
        not wanted.wants_x
        or wanted.z_is_y
        or wanted.grad_residual_dtype not in (None, z_dtype)
        or _val(grad_output).dtype != dtype
        or not _has_gate_kernel(x, z, options, backward)
    ):
        return
    # In a float32 stream the products are made of the rounded gradient.
    grads = [grad] if _val(grad).dtype == dtype else [u for u in grad.users if _is(u, _CAST) and _val(u).dtype == dtype]
    of_x = [user for g in grads for user in g.users if _other_operand(user, _MUL, g) is gate]
    of_gate = [user for g in grads for user in g.users if _other_operand(user, _MUL, g) is x]
    sums = [_sum_like(gate, product) for product in of_gate]  # without them x need not be saved
    nodes = [*of_x, *of_gate, *(node for found in sums for node in found)]
    if (
        not sums
        or not all(sums)
        or any(_val(node).dtype != dtype or _region(node) != _region(backward) for node in nodes)
        or any(backward < write < max(nodes) for write in writes)
    ):
        return

    others = {user for g in (grad, *grads) for user in g.users} - {*grads, *nodes}
    wanted = wanted._replace(
        x_dtype=dtype,
        wants_x=bool(of_x),
        wants_gate=True,
        grad_residual_dtype=z_dtype if others or 1 in results else None,
    )
    arguments = (grad_output, grad_residual_out, z, stats, x, gate, weight, bias, None)
    given = (*options._replace(residual_dtype=z_dtype), *wanted)
    parts = _unpack(_insert_behind(backward, backward, _ops.norm_backward, (*arguments, *given)))
    for node in of_x:
        node.replace_all_uses_with(parts[0])
    for found in sums:
        found[-1].replace_all_uses_with(parts[2])
    _erase_unread(graph, *nodes[::-1], *(g for g in grads if g is not grad))
    grad_z = parts[1]
    if grad.users and _val(grad).dtype != z_dtype:
        grad_z = _insert_behind(parts[-1], backward, _CAST, (grad_z, _val(grad).dtype))
    _replace(graph, backward, results, {**dict(enumerate(parts)), 0: grad_z})
    _erase_unread(graph, *parts)
    counters["grad_gate"] += 1


# ---- queries on a graph ----------------------------------------------------------------------------------------------


def _is(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def _is_positional(node: Node) -> bool:
    return not node.kwargs and len(node.args) == len(node.target._schema.arguments)


def _is_plain(options: reference.Options, is_rms_norm: bool = False) -> bool:
    """Whether a norm without dropout has no other options than eps, weight_offset and stats_grad."""
    ignored = {name: getattr(options, name) for name in ("weight_offset", "stats_grad", "dropout_p", "drops_y")}
    return options == reference.Options(*options[:2], is_rms_norm=is_rms_norm)._replace(**ignored)


class _NoValue(Exception):
    """Raised, before anything is changed, where another pass left a node without a fake value."""


def _val(node: Node) -> Any:
    if "val" not in node.meta:
        raise _NoValue
    return node.meta["val"]


def _region(node: Node) -> tuple:
    """The region of activation checkpointing. A fold across regions would increase the recomputation."""
    return node.meta.get("ac_graph_id"), node.meta.get("recompute")


def _same(one, two) -> bool:
    """Whether the sizes are equal, without a guard on symbolic sizes."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return len(one) == len(two) and all(statically_known_true(m == n) for m, n in zip(one, two, strict=True))


def _same_layout(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.dtype == two.dtype and _same(one.shape, two.shape) and _same(one.stride(), two.stride())


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _terms(node: Node | None) -> tuple[Node, Node] | None:
    """The two terms of a sum, if they have its shape and device and are different tensors."""
    if not _is(node, _ADD) or node.kwargs or not all(isinstance(t, Node) for t in node.args):
        return None
    a, b = node.args
    whole = _val(node)
    fits = all(_same(_val(t).shape, whole.shape) and _val(t).device == whole.device for t in (a, b))
    return (a, b) if fits and a is not b else None


def _other_operand(node: Node | None, target: Any, operand: Node) -> Node | None:
    """The other operand of a product or sum of two different tensors."""
    if not _is(node, target) or node.kwargs or operand not in node.args:
        return None
    other = node.args[node.args[0] is operand]
    return other if isinstance(other, Node) and other is not operand else None


def _is_shared(parameter: Node, x: Node, options: reference.Options) -> bool:
    """Whether the operators take it as weight or bias that some rows share: x's shape, with 1 for the last leading
    dimensions, at least one."""
    shape, sizes = _val(parameter).shape, _val(x).shape
    own = leading = len(sizes) - options.normalized_ndim
    if len(shape) != len(sizes) or _val(parameter).device != _val(x).device:
        return False
    while own and isinstance(shape[own - 1], int) and shape[own - 1] == 1:
        own -= 1
    return own < leading and _same((*shape[:own], *shape[leading:]), (*sizes[:own], *sizes[leading:]))


def _is_of_columns(parameter: Node, x: Node, options: reference.Options) -> bool:
    """Whether the parameter has a value for each column, which all rows share."""
    shape, value = _val(parameter).shape, _val(x)
    return _same(shape, value.shape[-options.normalized_ndim :]) and _val(parameter).device == value.device


def _sum_like(parameter: Node, product: Node) -> list[Node]:
    """The sum of the product over the dimensions along which the parameter is shared, and the view of that sum without
    them, if the parameter does not have them; [] if the graph has something else."""
    total, shape = _only_user(product), _val(parameter).shape
    if _is_sum(total, shape):
        return [total]
    ones = [1] * (_val(product).dim() - len(shape))
    if not _is_sum(total, [*ones, *shape]):
        return []
    view = _only_user(total)
    return [total, view] if _is(view, *_VIEWS) and _same(_val(view).shape, shape) else []


def _is_sum(node: Node | None, shape) -> bool:
    """Whether the node is a sum that keeps its dimensions, with a result of this shape."""
    is_sum = _is(node, _aten.sum.dim_IntList) and len(node.args) == 3 and node.args[2] is True
    return is_sum and _same(_val(node).shape, shape)


def _backward_of(results: dict[int, Node]) -> tuple[bool, Node | None]:
    """norm_backward, None if nothing reads the statistics; first, whether one of the two holds."""
    stats = results.get(2)
    if stats is None or not stats.users:
        return True, None
    node = _only_user(stats)
    is_backward = _is(node, _ops.norm_backward) and _is_positional(node) and node.args[3] is stats
    is_known = is_backward and not _ops._split(node.args[9:])[1].z_is_y
    return is_known, node if is_known else None


def _uncast(node: Node) -> Node:
    """The 16-bit tensor that this float32 node is a cast of; otherwise the node."""
    is_widened = _is(node, _CAST) and _val(node).dtype == torch.float32 and _val(node.args[0]).dtype in _NARROW
    return node.args[0] if is_widened else node


def _is_kernel(node: Node) -> bool:
    """Whether Inductor calls an existing kernel for the node instead of generating one."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is None:  # such as flex_attention
        return isinstance(node.target, torch._ops.HigherOrderOperator)
    if node.target.namespace not in ("aten", "prims"):
        return True
    return packet.__name__ in _KERNELS or packet.__name__.startswith("_scaled_dot_product")


def _is_view(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and any(r.alias_info is not None for r in target._schema.returns)


def _is_read_by_kernel(node: Node, *through: Any) -> bool:
    """Whether an existing kernel or the caller reads the value, also through views and operators in `through`."""
    return any(
        user.op == "output"
        or _is_kernel(user)
        or ((_is_view(user) or _is(user, *_VIEWS, *through)) and _is_read_by_kernel(user, *through))
        for user in node.users
    )


def _is_in_memory(node: Node) -> bool:
    """Whether the value is written to memory anyway. Otherwise Inductor adds in the kernel that computes it, and a norm
    that adds it would cost a write and a read."""
    if any(user.op == "output" or _is_kernel(user) for user in node.users):
        return True
    while _is(node, operator.getitem, _CAST, *_VIEWS) or _is_view(node):
        node = node.args[0]
    return node.op != "call_function" or _is_kernel(node)


def _may_write(node: Node) -> bool:
    """Whether the node may write to memory that others read."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def _garbles_dtypes() -> bool:
    """Whether the graph is for AOTInductor of a torch that passes optional dtypes wrongly."""
    from torch._inductor.virtualized import V

    return torch.__version__ < (2, 13) and V.aot_compilation is True


def _results(node: Node) -> dict[int, Node] | None:
    """The getitems of a node by index; None if something else reads it."""
    if not all(_is(user, operator.getitem) for user in node.users):
        return None
    found = {user.args[1]: user for user in node.users}
    return found if len(found) == len(node.users) else None


# ---- changes to a graph ----------------------------------------------------------------------------------------------


def _call(graph: Graph, like: Node, target: Any, args: tuple) -> Node:
    """A new node with the metadata of `like` and the value of the target's fake implementation."""
    values = torch.fx.map_arg(args, _val)
    mode = next(v.fake_mode for v in torch.utils._pytree.tree_leaves(values) if isinstance(v, torch.Tensor))
    with mode, torch.no_grad():
        value = target(*values)
    new = graph.call_function(target, args)
    new.meta = {key: meta for key, meta in like.meta.items() if key not in ("tensor_meta", "eager_input_vals")}
    new.meta["val"] = value
    return new


def _formula(norm: Node) -> Graph:
    """The graph of reference.norm_forward for the node's arguments, from its tensors to (y,)."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    # The rounding error of a float32 mean is far below sigma of 16-bit elements, unless all are equal
    has_exact_mean = _val(norm.args[0]).dtype not in _NARROW

    def formula(*tensors):
        given = iter(tensors)
        arguments = [next(given) if isinstance(t, Node) else t for t in norm.args]
        return reference.norm_forward(*arguments, has_exact_mean=has_exact_mean)[:1]

    values = [_val(t) for t in norm.args if isinstance(t, Node)]
    with values[0].fake_mode, torch.no_grad():
        return make_fx(formula, select_decomp_table())(*values).graph


def _insert_behind(place: Node, like: Node, target: Any, args: tuple) -> Node:
    with place.graph.inserting_after(place):
        return _call(place.graph, like, target, args)


def _unpack(node: Node) -> list[Node]:
    """The results of a new node."""
    parts: list[Node] = []
    for index in range(len(node.meta["val"])):
        parts.append(_insert_behind(parts[-1] if parts else node, node, operator.getitem, (node, index)))
    return parts


def _replace(graph: Graph, old: Node, results: dict[int, Node], by: dict[int, Node]) -> None:
    """Replace old's results by those in `by`, and erase old."""
    for index, part in results.items():
        if part.users:
            part.replace_all_uses_with(by[index])
        graph.erase_node(part)
    graph.erase_node(old)


def _erase_unread(graph: Graph, *nodes: Node) -> None:
    for node in nodes:
        if not node.users:
            graph.erase_node(node)


# ---- the lowerings ---------------------------------------------------------------------------------------------------


@functools.cache
def _lower_to_direct_calls() -> None:
    """Make Inductor's Python code bypass the dispatcher (call_operator in csrc/torch/python.cpp)."""
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    class DirectCall(ir.FallbackKernel):
        """A call of the operator with one more argument, in which bit i says whether result i is read."""

        used = None

        def codegen(self, wrapper):
            is_python = not (V.graph.cpp_wrapper or V.graph.aot_mode or getattr(V.graph, "fx_wrapper", False))
            if is_python and hasattr(wrapper, "add_import_once"):
                wrapper.add_import_once("from fused_layernorm._ops import calls as fused_layernorm_calls")
                self.python_kernel_name = f"fused_layernorm_calls.call_{self.op_overload._opname}"
                is_read = [output.get_name() not in V.graph.removed_buffers for output in self.outputs]
                self.used = sum(read << i for i, read in enumerate(is_read))
            super().codegen(wrapper)

        def codegen_args(self):
            return [*super().codegen_args(), *([] if self.used is None else [str(self.used)])]

    def lower(op, *args, **kwargs):
        kernel = DirectCall if _is_enabled and not kwargs else ir.FallbackKernel
        outputs = kernel.create(op, *args, **kwargs)
        for output in outputs:
            output.skip_size_stride_alignment_checks = kernel is DirectCall  # known to hold; the assertions cost time
        return tuple(map(ir.TensorBox.create, outputs))

    for op in (_ops.norm_forward, _ops.norm_backward, _ops.sandwich_norm):
        function = functools.partial(lower, op)
        lowering.register_lowering(op, type_promotion_kind=None, broadcast=False)(function)

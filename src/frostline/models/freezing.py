"""Freeze a network up to a layer: whatever runs before the layer's output stops training and goes into eval mode."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from frostline.core.config import describe_value
from frostline.core.errors import ModelError, SettingError, UnknownLayer
from frostline.core.hints import add_hints, suggest_names
from frostline.models.modules import AnyInputs, all_in_eval, input_specs, modes, resolved_path, unwrap, zeros
from frostline.models.outside import has_values
from frostline.models.tracing import autograd_leaves, cast_inputs

__all__ = (
    "before_the_line",
    "classifier_of",
    "freeze",
    "frozen_modules",
    "layer_of",
    "requested_line",
    "require_network",
    "require_shapes",
    "trained_paths",
    "unfreeze",
    "used_parameters",
)

_ALL_BUT_THE_CLASSIFIER = "features"
_MAX_SHOWN = 12
_ASKED = "frostline_until"
"""The attribute of a network that was frozen which says up to where, so that a job can tell what became of it."""

M = TypeVar("M", bound=nn.Module)


@add_hints
def freeze(model: M, until: str | Sequence[str], *, input_shape: AnyInputs = (3, 224, 224)) -> M:
    """Freeze the first layers of ``model``, up to the output of the layer ``until``; later layers are not changed.

    The network runs once, on one sample of zeros, to see the order in which its layers are used. Every parameter that
    is used before the output of ``until`` is ready gets ``requires_grad=False``, and so does every parameter of that
    layer. With several layers in ``until``, this holds for all parameters that their outputs are computed from.
    Modules that are completely frozen are put into eval mode, so that BatchNorm uses its stored statistics and dropout
    is off. So are modules without parameters, such as dropout, that never run behind the frozen ones.

    Args:
        model: the network, changed in place. It may be compiled, or wrapped for several devices (``models.modules``).
        until: the dotted path of the last frozen module, such as ``"layer3"``, as in ``named_modules()`` of the network
            or of the network inside a wrapper. ``"features"`` freezes all but the classifier (the last layer that has
            parameters) if the network has no module of that name. For several encoders, a list with the last frozen
            module of each.
        input_shape: shape of one sample, without the batch dimension; by default an image of 224 by 224 pixels. For
            other inputs one ``TensorSpec`` each, or a dict of them by argument name; a preprocessing has them as its
            ``inputs``, such as ``fl.preprocess.text(tokenizer).inputs``.

    Returns:
        The same ``model``.

    Raises:
        SettingError: ``model`` is no network, ``until`` is no path, or ``input_shape`` is no shape.
        UnknownLayer: There is no such module, or the network never runs it; or ``"features"`` finds no classifier.
        ModelError: The network does not run on a sample of that shape.
    """
    require_network(model)
    paths: list[Any] = list(until) if isinstance(until, list | tuple) else [until]
    for path in paths:
        if not isinstance(path, str):
            raise SettingError(f"until takes the name of a layer{_name_meant(model, path)}")
    _check_shape(input_shape)
    require_shapes(model)
    inner, paths = unwrap(model), [resolved_path(model, path) for path in paths]
    if len(paths) == 1:
        _freeze(inner, paths[0], input_shape)
    else:
        _freeze_several(inner, paths, input_shape)
    return model


def _check_shape(given: object) -> None:
    """Make sure that this may be the shape of a sample, and neither a size, a sample nor the shape of a batch."""
    if isinstance(given, int | str | torch.Tensor):
        write = f"{tuple(given.shape[1:])}" if isinstance(given, torch.Tensor) else "(3, 224, 224)"
        raise SettingError(f"input_shape takes the shape of one sample, not {describe_value(given)}: write {write}")


def require_network(model: object) -> None:
    """Do nothing if a model is a network of PyTorch.

    Raises:
        SettingError: The model is something else, such as the name of one.
    """
    if isinstance(model, nn.Module):
        return
    hint = f": write timm.create_model({model.rpartition(':')[2]!r}, pretrained=True)" if isinstance(model, str) else ""
    if isinstance(model, type):
        hint = f": write {model.__name__}()"
    elif isinstance(model, dict):
        hint = ": give the network whose weights these are"
    raise SettingError(f"model takes a torch.nn.Module, not {describe_value(model)}{hint}")


def require_shapes(model: nn.Module) -> None:
    """Do nothing if all parameters of a network have shapes, which lazy layers get in their first run.

    Raises:
        ModelError: A parameter has none yet.
    """
    for path, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ModelError(
                f"parameter {path!r} has no shape yet: run the network once on a batch before layers are frozen and "
                "the job is made, so that its lazy layers have theirs"
            )


def _name_meant(model: nn.Module, given: object) -> str:
    """End a sentence about what is no name of a layer; a layer itself has one."""
    names = [name for name, module in model.named_modules() if module is given and name]
    if names:
        return f", not the layer: write until={names[0]!r}"
    return f", such as layer4, not {given if isinstance(given, int) else type(given).__name__}"


def _freeze(model: nn.Module, until: str, inputs: AnyInputs) -> None:
    used = used_parameters(model, inputs)
    for parameter in _up_to(model, until, used):
        parameter.requires_grad_(False)
    setattr(model, _ASKED, until)
    _in_eval(model, used)


def _freeze_several(model: nn.Module, paths: Sequence[str], inputs: AnyInputs) -> None:
    layers = {path: layer_of(model, path) for path in paths}
    if not layers:
        raise UnknownLayer("no layer is named up to which the network should be frozen (until)")
    found = _computed_from(model, layers, inputs)
    for parameter in [*found, *(parameter for layer in layers.values() for parameter in layer.parameters())]:
        parameter.requires_grad_(False)
    vars(model).pop(_ASKED, None)  # the line lies where the outputs of all of them have been computed
    _in_eval(model, used_parameters(model, inputs))


def _computed_from(model: nn.Module, layers: Mapping[str, nn.Module], inputs: AnyInputs) -> list[nn.Parameter]:
    """The parameters that the outputs of layers depend on, as autograd has it: other branches run in between."""
    outputs: dict[str, list[torch.Tensor]] = {}
    needed = {parameter: parameter.requires_grad for parameter in model.parameters() if parameter.is_floating_point()}

    def ended(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            outputs.setdefault(path, []).extend(leaves)

        return hook

    hooks = [layer.register_forward_hook(ended(path)) for path, layer in layers.items()]
    try:
        for parameter in needed:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            _run_on_zeros(model, inputs)
    finally:
        for handle in hooks:
            handle.remove()
        for parameter, was_needed in needed.items():
            parameter.requires_grad_(was_needed)
    for path in layers:
        if path not in outputs:
            raise _never_run(path)
    return autograd_leaves([tensor for tensors in outputs.values() for tensor in tensors])


def _in_eval(model: nn.Module, used: list[tuple[str, nn.Parameter | None]]) -> None:
    """Put what is frozen into eval mode, and what runs before the frost line alone."""
    for _, module in frozen_modules(model):
        module.train(False)
    for _, module in before_the_line(model, used):
        module.training = False


def unfreeze(model: nn.Module, layers: Sequence[str], *, input_shape: AnyInputs = (3, 224, 224)) -> list[nn.Parameter]:
    """Train these layers too: their parameters require gradients, and all but what stays frozen is in train mode.

    Args:
        model: the model, changed in place.
        layers: the dotted paths of modules, as for ``freeze``.
        input_shape: shape of one sample, as for ``freeze``.

    Returns:
        Parameters of these layers that were frozen until now.

    Raises:
        UnknownLayer: There is no such module.
        ModelError: The network does not run on a sample of that shape.
    """
    inner = unwrap(model)
    parameters = [parameter for layer in layers for parameter in layer_of(model, layer).parameters()]
    added = [parameter for parameter in dict.fromkeys(parameters) if not parameter.requires_grad]
    for parameter in added:
        parameter.requires_grad_(True)
    vars(inner).pop(_ASKED, None)  # what was asked for first is no longer where the line should be
    inner.train()
    _in_eval(inner, used_parameters(inner, input_shape))
    return added


def layer_of(model: nn.Module, path: str) -> nn.Module:
    """The module of a path, as ``freeze`` reads it.

    Raises:
        UnknownLayer: There is no such module.
    """
    modules: dict[str, nn.Module] = dict(unwrap(model).named_modules())
    found = modules.get(resolved_path(model, path)) if path else None
    if found is None:
        raise UnknownLayer(f"the network has no layer {path!r}{_layers_near(path, [name for name in modules if name])}")
    return found


def _layers_near(path: str, names: Sequence[str]) -> str:
    """The layers that a wrong path probably means, else the first ones of those that lie within no other."""
    whole = [name for name in names if "." not in name]
    shown = ", ".join(whole[:_MAX_SHOWN]) + (", …" if len(whole) > _MAX_SHOWN else "")
    return suggest_names(path, names) or f"; it has {shown}"


def requested_line(model: nn.Module) -> str | None:
    """The module up to which ``freeze`` was asked to freeze the network; None where it named none."""
    until = getattr(model, _ASKED, None)
    return until if any(path == until for path, _ in model.named_modules() if path) else None


def frozen_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that have parameters, none of which is trained, with their paths."""
    inside: list[str] = []
    for path, module in model.named_modules():
        if any(not outer or path.startswith(f"{outer}.") for outer in inside):
            continue
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            inside.append(path)
            yield path, module


def before_the_line(model: nn.Module, used: list[tuple[str, nn.Parameter | None]]) -> Iterator[tuple[str, nn.Module]]:
    """The modules without parameters that run before the frost line alone, with their paths.

    The line lies behind the last use of a frozen parameter, and behind the module that ``freeze`` was given, as far as
    nothing is trained before them.

    Args:
        model: the parameters that are trained require gradients.
        used: parameters that a forward pass uses, as ``used_parameters`` lists them.
    """
    trained = (place for place, (_, parameter) in enumerate(used) if parameter is not None and parameter.requires_grad)
    frozen = used[: next(trained, len(used))]
    asked = requested_line(model)
    line = max(
        (place for place, (path, parameter) in enumerate(frozen) if parameter is not None or path == asked), default=-1
    )
    behind = {path for path, parameter in used[line + 1 :] if parameter is None}
    ran = {path for path, parameter in used if parameter is None}
    for path, module in model.named_modules():
        if path in ran - behind and next(module.parameters(), None) is None:
            yield path, module


def used_parameters(model: nn.Module, inputs: AnyInputs) -> list[tuple[str, nn.Parameter | None]]:
    """What one forward pass uses, in order: ``(module path, parameter)``; None stands for a module's output.

    A module that runs several times is listed each time. The model is left as it was.

    Raises:
        ModelError: The network does not run on such a sample.
    """
    recorder = _Recorder(model)
    try:
        with torch.no_grad(), recorder:
            _run_on_zeros(model, inputs)
    finally:
        recorder.remove()
    return recorder.seen


def _run_on_zeros(model: nn.Module, inputs: AnyInputs) -> None:
    """Run the network in eval mode on one sample of zeros.

    Raises:
        ModelError: The network does not run on such a sample.
    """
    specs = input_specs(inputs)
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    try:
        with modes(model, all_in_eval(model)):
            sample = cast_inputs(model, zeros(specs, 1, device))
            if isinstance(inputs, Mapping):
                model(**dict(zip(inputs, sample, strict=True)))
            else:
                model(*sample)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        shapes = " and ".join(str(list(spec.shape)) for spec in specs)
        named = f", called {', '.join(inputs)}" if isinstance(inputs, Mapping) else ""
        given = specs[0].shape
        hint = f"; give it without the batch: write input_shape={given[1:]}" if given[0] == 1 and len(given) > 3 else ""
        raise ModelError(f"the network does not run on an input of shape {shapes}{named}: {why}{hint}") from error


def _up_to(model: nn.Module, until: str, used: list[tuple[str, nn.Parameter | None]]) -> list[nn.Parameter]:
    paths = [path for path, _ in model.named_modules() if path]
    if until in paths:
        ends = [place for place, (path, parameter) in enumerate(used) if path == until and parameter is None]
        if not ends:
            raise _never_run(until)
        known = {id(parameter) for _, parameter in used}
        # What the layer has for train mode alone, such as the filling of masked places, would keep it in train mode.
        idle = [parameter for parameter in model.get_submodule(until).parameters() if id(parameter) not in known]
        return [*idle, *(parameter for _, parameter in used[: ends[-1]] if parameter is not None)]
    if until != _ALL_BUT_THE_CLASSIFIER:
        raise UnknownLayer(
            f"the network has no layer {until!r}{_layers_near(until, [*paths, _ALL_BUT_THE_CLASSIFIER])}"
        )
    path, classifier = classifier_of(model, used)
    kept = {id(parameter) for parameter in classifier.parameters()}
    if not path or all(parameter.dim() < 2 for parameter in classifier.parameters()):  # such as the last normalisation
        what = f"{path!r} ({type(classifier).__name__})" if path else f"{type(model).__name__} itself"
        raise UnknownLayer(
            f"the network has no classifier that {until!r} would leave: {what} comes last of what has parameters; make "
            "it with one (num_classes=), or name the last layer to freeze"
        )
    return [parameter for parameter in model.parameters() if id(parameter) not in kept]


def _never_run(path: str) -> UnknownLayer:
    return UnknownLayer(f"layer {path!r} is never run by the network, so nothing can be frozen up to it")


def classifier_of(model: nn.Module, used: list[tuple[str, nn.Parameter | None]]) -> tuple[str, nn.Module]:
    """Path and module of the owner of the parameter that a forward pass uses last.

    Raises:
        ModelError: The network uses no parameters.
    """
    last = next((parameter for _, parameter in reversed(used) if parameter is not None), None)
    for path, module in model.named_modules():
        if any(last is parameter for parameter in module.parameters(recurse=False)):
            return path, module
    raise ModelError("the network uses no parameters, so there is nothing to freeze")


class _Recorder(TorchFunctionMode):
    """Sees every torch function's arguments, and the end of every module's forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.seen: list[tuple[str, nn.Parameter | None]] = []
        self._shown: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._known = {id(parameter) for parameter in model.parameters()}
        self._hooks = [module.register_forward_hook(self._ended(path)) for path, module in model.named_modules()]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for tensor, before in reversed(self._shown):
            tensor.copy_(before)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.numpy, torch.Tensor.__array__):  # through which code may write unseen
            self._shown.append((args[0].detach(), args[0].detach().clone()))
        # Reading an attribute (shape, dtype) of a parameter is no use of its values.
        if getattr(func, "__name__", "") != "__get__":
            self.seen.extend(("", item) for item in _flatten((*args, *kwargs.values())) if id(item) in self._known)
        return func(*args, **kwargs)

    def _ended(self, path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self.seen.append((path, None))

        return hook


def _flatten(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flatten(value)
        else:
            yield value


def trained_paths(model: nn.Module) -> dict[str, str]:
    """Paths of the tensors that training changes, each with the path of the parameter that is trained.

    Those are trained parameters, and other parameters and buffers in whose memory they lie: what is made by
    ``nn.Parameter(layer.weight.data, requires_grad=False)`` changes with each step that the layer takes.

    Args:
        model: owner of them all.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    trained = {path: path for path, parameter in parameters.items() if parameter.requires_grad}
    spans = []
    for path, tensor in (*parameters.items(), *model.named_buffers(remove_duplicate=False)):
        if has_values(tensor) and tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            spans.append((str(tensor.device), start, start + (last + 1) * tensor.itemsize, path))
    together: list[list[tuple[str, int, int, str]]] = []
    reached = ("", 0)
    for span in sorted(spans):
        if span[:2] >= reached:
            together.append([])
            reached = ("", 0)
        together[-1].append(span)
        reached = max(reached, (span[0], span[2]))
    shared = {
        path: other
        for some in together
        for _, begins, ends, other in some
        if other in trained
        for _, start, end, path in some
        if path not in trained and start < ends and begins < end
    }
    return trained | shared

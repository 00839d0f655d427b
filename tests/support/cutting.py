"""What every test of a cut network does: ship its prefix, run it to a cut, finish it and train its head."""

import torch

from frostline.core import FeatureBatch, Graph, Ref
from frostline.core.system import crc32
from frostline.engines.graph_runner import Runner, leaf_values
from frostline.engines.torch import TorchEngine
from frostline.models.artifact import read_prefix, write_prefix
from frostline.models.graph import after
from frostline.wire.framing import Encoder, decode


def shipped_engine(network):
    """An engine for the prefix as it arrives at a node."""
    prefix = read_prefix(write_prefix(network.prefix))
    return TorchEngine(prefix.graph, prefix.cuts, prefix.tensors)


def crossed(engine, inputs, cut):
    """What crosses a cut, as tensors; the inputs must come out of it unchanged."""
    arrays = [item.numpy().copy() for item in inputs]
    tensors = engine.run(arrays, cut.number)
    assert all((array == item.numpy()).all() for array, item in zip(arrays, inputs, strict=True))
    assert sum(tensor[0].nbytes for tensor in tensors) == cut.bytes_per_sample
    return [torch.from_numpy(tensor) for tensor in tensors]


def sent(tensors):
    """The tensors after they went over the wire."""
    encoder = Encoder()
    batch = FeatureBatch(ids=torch.arange(len(tensors[0])).numpy(), tensors=tuple(tensor.numpy() for tensor in tensors))
    body = b"".join(bytes(part) for part in [*encoder.encode(batch), encoder.finish()])
    [arrived] = decode(_Body(body))
    return [torch.from_numpy(tensor.copy()) for tensor in arrived.tensors]


def remaining_prefix(network, cut):
    """The frozen part from a cut to the frost line."""
    if network.prefix is None:
        names = network.frost_line.tensors
        return Graph(inputs=names, leaves=(), nodes=(), outputs=tuple(map(Ref, names)))
    return after(network.prefix.graph, cut)


def finished(network, cut, tensors):
    """What crosses the frost line, made from what crossed an earlier cut, which stays as it was."""
    rest = remaining_prefix(network, cut)
    before = [tensor.clone() for tensor in tensors]
    with torch.inference_mode():
        outputs = Runner(rest).run(tensors, leaf_values(rest, network.prefix.tensors))
    assert all(torch.equal(tensor, two) for tensor, two in zip(tensors, before, strict=True)), (
        "features were overwritten"
    )
    return [output.clone() for output in outputs]


class _Body:
    def __init__(self, body):
        self._rest, self.checksum = memoryview(body), 0

    def read(self, nbytes, /):
        taken, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        self.checksum = crc32(taken, self.checksum)
        return taken

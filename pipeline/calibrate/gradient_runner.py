"""Runs some nodes of an IR and, behind them, their gradients: given dL/d(output), dL/d(weights) and dL/d(inputs)."""

from collections.abc import Mapping, Sequence

import onnx_ir as ir
import onnxruntime  # type: ignore[import-untyped]

from ingot.errors import PassError
from ingot.passes.calibration import Float32Array
from ingot.pipeline.calibrate.gradients import Tape
from ingot.pipeline.calibrate.graph_runner import AnyArray, GraphCopy
from ingot.runtime.executors.segment_runner import session_options
from ingot.runtime.executors.thread_pool import use_thread_pool

_SEED = "gradient."


class GradientRunner:
    """A session over `nodes` (in graph order) for the gradient of one `output`.

    wanted        values that the nodes read: stored ones and at most one activation
    weights       stored values that are fed in float32, the wanted ones among them
    activations   names of the values that are fed
    """

    def __init__(
        self,
        nodes: Sequence[ir.Node],
        output: ir.Value,
        wanted: Sequence[ir.Value],
        shared: frozenset[ir.Node],
        sequence_tokens: int | None,
        num_threads: int | None = None,
    ) -> None:
        use_thread_pool(num_threads)
        copy = GraphCopy(shared, sequence_tokens, frozenset(wanted))
        for node in nodes:
            copy.node(node)
        graph = copy.model([output], nodes[0].graph).graph  # before the gradients: it turns the rows of rotations
        self._seed, self._given = f"{_SEED}{output.name}", output
        _differentiate(copy, graph, copy.values[output], self._seed, [copy.values[value] for value in wanted])
        self.weights, self.activations, self.wanted = tuple(copy.weights), tuple(copy.activations), tuple(wanted)
        try:
            proto = ir.to_proto(ir.Model(graph, ir_version=11, producer_name="ingot")).SerializeToString()
            self._session = onnxruntime.InferenceSession(proto, session_options(), providers=["CPUExecutionProvider"])
        except Exception as error:
            raise PassError(f"onnxruntime cannot run the gradients of {nodes[-1].name!r}: {error}") from error

    def run(
        self, activations: Mapping[str, AnyArray], weights: Mapping[ir.Value, AnyArray], gradient: Float32Array
    ) -> list[Float32Array]:
        """Gradients of the wanted values, in their order."""
        feeds = {name: activations[name] for name in self.activations} | {self._seed: gradient}
        feeds |= {value.name or "": weights[value] for value in self.weights}
        results: list[Float32Array] = self._session.run(None, feeds)
        return results


def _differentiate(copy: GraphCopy, graph: ir.Graph, output: ir.Value, seed: str, wanted: Sequence[ir.Value]) -> None:
    """Make the graph's outputs the gradients of the wanted values."""
    inputs, constants, nodes = len(graph.inputs), set(graph.initializers), len(copy.nodes)
    tape = Tape(copy, wanted)
    given = copy.input(ir.Value(name=seed), ir.DataType.FLOAT)
    tape.accumulate(output, given)
    gradients = tape.backward()
    missing = [value.name for value in wanted if value not in gradients]
    if missing:
        raise PassError(f"{output.name!r} does not depend on {missing[0]!r}")
    graph.inputs.extend(copy.inputs[inputs:])
    for value in copy.initializers:
        if value.name not in constants:
            graph.register_initializer(value)
    graph.extend(copy.nodes[nodes:])
    graph.outputs.clear()
    results = [
        copy.add("Identity", [gradients[value]]) for value in wanted
    ]  # an output stands once, under its own name
    graph.extend(copy.nodes[nodes:])
    for value in results:
        value.dtype = ir.DataType.FLOAT
    graph.outputs.clear()
    graph.outputs.extend(results)

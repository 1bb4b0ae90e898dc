"""Launches of a step are counted by bucket and kernel."""

from pathlib import Path

from benchmarks.programs.launches import of_artifact, table

from tests.runtime.cuda.artifacts import buckets, model_of, write_artifact


def test_the_launches_of_a_step_are_counted_by_kernel(tmp_path: Path) -> None:
    artifact = write_artifact(model_of(), tmp_path / "a", buckets((1,), ragged=8))
    decode, ragged = of_artifact(artifact.path)
    layers = artifact.manifest.model.num_layers
    assert (decode.bucket, ragged.bucket) == ("decode-1", "ragged-8")
    assert decode.by_kernel["decode_attention"] == ragged.by_kernel["ragged_attention"] == layers
    assert decode.by_kernel["greedy"] == decode.by_kernel["gather_rows"] == 1
    assert "ragged_attention" not in decode.by_kernel
    lines = table([decode, ragged]).splitlines()
    assert lines[0].split() == [artifact.manifest.name, "decode-1", "ragged-8"]
    assert lines[-1].split() == ["all", str(sum(decode.by_kernel.values())), str(ragged.total)]

"""``python -m dataset_builder.trace``: a valid file or a reason, and the exit code that says which."""

import json

import jsonschema
import pytest
import yaml

from dataset_builder.trace import graph_schema, main

JOB = {
    "model": {"preset": "llama3-8b"},
    "batch": {"seq_length": 2048, "micro_batch_size": 1, "global_batch_size": 64},
    "cluster": {"gpu": "H100-SXM5-80GB"},
    "parallel": {"tensor": 2, "pipeline": 2},
    "precision": "fp8_mixed",
}


def run(folder, job):
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return main([str(path), "--output", str(folder / "graph.json")])


def test_the_file_satisfies_the_schema(tmp_path, capsys):
    assert run(tmp_path, JOB) == 0
    data = json.loads((tmp_path / "graph.json").read_text())
    jsonschema.validate(data, graph_schema())
    assert [stage["stage"] for stage in data["stages"]] == [0, 1]
    for stage in data["stages"]:
        assert [node["id"] for node in stage["nodes"]] == list(range(len(stage["nodes"])))
        assert all(edge["target"] < len(stage["nodes"]) for edge in stage["edges"])
    printed = capsys.readouterr()
    assert "stage 1" in printed.out
    assert printed.err == ""
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_the_schema_refuses_what_is_no_graph(tmp_path):
    run(tmp_path, JOB)
    data = json.loads((tmp_path / "graph.json").read_text())
    data["stages"][0]["nodes"][0]["kind"] = "magic"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, graph_schema())


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"batch": {"seq_length": "many"}}, 2, "batch.seq_length"),
        ({"modle": {}}, 2, "modle"),
        ({"parallel": {"tensor": 3}}, 4, "TP3"),
    ],
)
def test_a_bad_job_is_named_on_stderr(tmp_path, capsys, change, code, words):
    assert run(tmp_path, {**JOB, **change}) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    assert "job.yaml" in printed.err
    assert not (tmp_path / "graph.json").exists()


def test_an_output_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    assert main([str(tmp_path / "job.yaml"), "--output", str(tmp_path / "none" / "graph.json")]) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path / 'none' / 'graph.json'}: ")

import json

from click.testing import CliRunner

from bench.gateway import gateway


def test_each_carrier_is_measured_beside_the_bare_send(tmp_path):
    path = tmp_path / "gateway.json"
    arguments = ["--streams", "2", "--output-len", "40", "--tokens-per-s", "400"]
    result = CliRunner().invoke(gateway, [*arguments, "--output-json", str(path)])
    assert result.exit_code == 0, result.output
    assert "us/token" in result.output
    document = json.loads(path.read_text())
    assert document["schema"] == "headrace.bench.gateway/1"
    assert document["loop"] == "uvloop"
    assert [(row["through"], row["streams"]) for row in document["rows"]] == [
        ("websocket", 2),
        ("sse", 2),
    ]
    for row in document["rows"]:
        assert row["bare_send_us"] > 0
        assert row["loop_us_per_token"] > 0

"""The command line of `rayloom-operator` itself; each command has tests of its own."""

from pathlib import Path

import pytest
import yaml

from rayloom_operator import __version__
from rayloom_operator.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


def test_without_a_command_there_is_help(capsys):
    assert main([]) == 2
    said = capsys.readouterr()
    assert all(f"    {command} " in said.out for command in ("local", "plan", "run"))
    assert said.err == ""


def test_the_printed_version_is_that_of_the_chart(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"rayloom-operator {__version__}\n"
    chart = yaml.safe_load((ROOT / "charts/rayloom-operator/Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


def test_a_plan_is_for_the_image_that_the_chart_runs(capsys):
    assert main(["plan", "-f", str(ROOT / "examples/smollm2.yaml"), "-o", "yaml"]) == 0
    printed = list(yaml.safe_load_all(capsys.readouterr().out))
    (cluster,) = [each for each in printed if each["kind"] == "RayCluster"]
    values = yaml.safe_load((ROOT / "charts/rayloom-operator/values.yaml").read_text())
    images = {container["image"] for container in cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]}
    assert images == {values["engine"]["image"]}

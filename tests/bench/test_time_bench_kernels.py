"""Kernels in the time bench: any file of these names and columns is read, and what it can't express has a reason."""

import json

import pytest

from tests.bench import time_bench

HEADER = "part,op,latency_ms,device,torch,cuda,B,M,N,K,H,kernel,source"
LINES = [
    "held,linear,1.2,NVIDIA L4,p2.1.0,cu121,1,2048,1024,1024,,k,s",
    "held,linear,4.1,NVIDIA L4,p2.1.0,cu121,1,2048,4096,1024,,k,s",
    "held,bmm,0.2,NVIDIA H100 80GB HBM3,p2.1.0,cu121,64,128,64,128,,k,s",
    "held,softmax,0.05,NVIDIA H100 80GB HBM3,p2.1.0,cu121,2048,,,,1024,k,s",
    "held,add,0.1,NVIDIA A100 80GB PCIe,p2.1.0,cu121,4096,,,,2048,k,s",
    "held,conv,0.1,NVIDIA L4,p2.1.0,cu121,4096,,,,2048,k,s",
    "held,ln,0.1,MI300X,p2.1.0,cu121,4096,,,,2048,k,s",
    "held,ln,0.1,Voodoo 2,p2.1.0,cu121,4096,,,,2048,k,s",
    "held,ln,,NVIDIA L4,p2.1.0,cu121,4096,,,,2048,k,s",
]
LIGER = (
    "kernel_name,kernel_provider,kernel_operation_mode,metric_name,metric_unit,x_name,x_label,x_value,y_value_50,"
    "extra_benchmark_config_str,gpu_name,in_head\n"
    'softmax,torch,forward,speed,ms,N,n,1024,0.05,"{""M"": 2048, ""dtype"": ""torch.float32""}",NVIDIA L4,True\n'
    'rope,torch,forward,speed,ms,H,h,1024,0.05,"{""M"": 2048}",NVIDIA L4,True\n'
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "neusight_ops.csv").write_text("\n".join([HEADER, *LINES]) + "\n", "utf-8")
    (tmp_path / "liger_kernels.csv").write_text(LIGER, "utf-8")
    return tmp_path


def test_rows_of_other_cards_are_read_and_the_rest_has_a_reason(folder, monkeypatch, capsys):
    each = folder / "each.csv"
    arguments = ["time_bench.py", "--rows", str(folder), "--only", "kernels", "--vs", "--json", "--each", str(each)]
    monkeypatch.setattr("sys.argv", arguments)
    assert time_bench.main() == 0
    out, err = capsys.readouterr()
    said = json.loads(out.splitlines()[-1])
    assert said["kernels"]["rows"] == 6
    assert {"median_absolute_error", "p90_absolute_error", "interval_coverage"} <= set(said["kernels"])
    assert set(said["kernels"]["by_source"]) == {"neusight", "liger"}
    assert said["kernels"]["plain_roofline"]["rows"] == 6
    assert sorted(said["unexpressed"].values()) == [1, 1, 1, 1, 1]
    reasons = " ".join(said["unexpressed"])
    for word in ("conv: no law", "Voodoo", "has no capability, sms", "a size is missing", "rope has no expression"):
        assert word in reasons
    assert "H100 SXM 80 GB" in err
    assert len(each.read_text("utf-8").splitlines()) == 7


def test_folds_predict_each_card_by_the_others(folder):
    rows, _ = time_bench.read_kernels(folder)
    predicted, spread = time_bench.predictions(rows, 3)
    assert (predicted > 0).all()
    assert (spread > 0).all()


def test_pictures_are_drawn_for_each_group(folder, tmp_path):
    rows, _ = time_bench.read_kernels(folder)
    time_bench.time_pictures.draw(tmp_path / "drawn", time_bench.compared(rows, None))
    names = sorted(path.name for path in (tmp_path / "drawn").iterdir())
    assert names == ["time-bmm.svg", "time-elementwise.svg", "time-linear.svg", "time-softmax.svg"]
    assert "L4" in (tmp_path / "drawn" / "time-linear.svg").read_text("utf-8")

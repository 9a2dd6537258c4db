"""Costs against sums done by hand, and files of prices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dorylus_hpc.errors import InputError
from dorylus_hpc.report.cost import (
    Bill,
    Cost,
    Fleet,
    Meter,
    billed_seconds,
    gb_seconds,
    load_prices,
    value,
)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def own(tmp_path):
    def write(text):
        path = tmp_path / "own.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


# ---- prices ----


def test_packaged_prices():
    prices = load_prices()
    assert (prices.region, prices.dated, prices.currency) == ("us-east-1", "2026-11", "USD")
    assert prices.per_million_requests == 0.20
    assert prices.gb_second == {"x86_64": 1.66667e-5, "arm64": 1.33334e-5}
    told = ("c5n.2xlarge", "c5.xlarge", "c6i.4xlarge", "c7g.2xlarge", "m5.large", "r5.24xlarge")
    assert [prices.instance(kind) for kind in told] == [0.432, 0.17, 0.68, 0.29, 0.096, 6.048]


def test_within_a_family_prices_follow_the_size():
    """On demand, AWS asks for twice the price for twice the size; a slip in the list breaks this."""
    sizes = {"large": 1, "xlarge": 2}
    for kind, price in load_prices().ec2_hour.items():
        family, size = kind.split(".")
        factor = sizes.get(size) or 2 * int(size.removesuffix("xlarge"))
        assert price == pytest.approx(factor * load_prices().instance(f"{family}.large"), rel=1e-9), kind


@pytest.mark.parametrize(("kind", "near"), [("c5n.2xlrge", "c5n.2xlarge"), ("c5n-2xlarge", "c5n.2xlarge")])
def test_an_unknown_type_lists_what_is_near(kind, near):
    with pytest.raises(InputError, match=f"--instance-type {kind}: no price in us-east-1 .near: .*{near}"):
        load_prices().instance(kind)


def test_an_unknown_type_unlike_any_lists_all():
    with pytest.raises(
        InputError, match=r"--instance-type ~: no price in us-east-1 \(known: c5\.large, .* \.\.\.\)"
    ):
        load_prices().instance("~")


def test_own_prices_override_one_by_one(own):
    path = own(
        'dated = "2027-01"\n[regions.us-east-1.ec2_hour]\n"c5n.2xlarge" = 0.5\n"new.large" = 1\n'
        "[regions.us-east-1.lambda.gb_second]\narm64 = 2e-5\n"
    )
    prices = load_prices(path)
    assert prices.dated == "2027-01"
    assert prices.instance("c5n.2xlarge") == 0.5
    assert prices.instance("new.large") == 1
    assert prices.instance("c5n.xlarge") == load_prices().instance("c5n.xlarge")
    assert prices.gb_second == {"x86_64": 1.66667e-5, "arm64": 2e-5}
    assert prices.per_million_requests == 0.20


def test_own_region(own):
    text = (
        'dated = "2027-01"\n[regions.eu-central-1.lambda]\nper_million_requests = 0.2\n'
        "gb_second = {x86_64 = 1.7e-5, arm64 = 1.4e-5}\n"
    )
    prices = load_prices(own(text), region="eu-central-1")
    assert (prices.gb_second["x86_64"], prices.ec2_hour) == (1.7e-5, {})
    with pytest.raises(
        InputError, match=r"region eu-west-1: no prices .*regions there: us-east-1, eu-central-1"
    ):
        load_prices(own(text), region="eu-west-1")


def test_a_region_without_a_price_of_lambda_is_refused(own):
    path = own('dated = "2027-01"\n[regions.x.lambda]\nper_million_requests = 0.2\n')
    with pytest.raises(InputError, match="--region x: no price 'gb_second' for it"):
        load_prices(path, region="x")


def test_another_currency_is_not_mixed_with_the_packaged_one(own):
    text = (
        'dated = "2027-01"\ncurrency = "EUR"\n[regions.us-east-1.ec2_hour]\n"c5.large" = 0.08\n'
        "[regions.us-east-1.lambda]\nper_million_requests = 0.18\ngb_second = {x86_64 = 1, arm64 = 2}\n"
    )
    prices = load_prices(own(text))
    assert (prices.currency, prices.ec2_hour) == ("EUR", {"c5.large": 0.08})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('date = "2027"', "unknown key 'date': did you mean 'dated'"),
        ("[regions.r.ec2]\n", r"unknown key 'regions\.r\.ec2': known: ec2_hour, lambda"),
        (
            "[regions.r.lambda.gb_second]\narm = 1",
            r"unknown key 'regions\.r\.lambda\.gb_second\.arm': did you mean 'arm64'",
        ),
        ("[regions.r.lambda]\nzzz = 1", "unknown key 'regions.r.lambda.zzz': known: per_million_requests"),
        ('[regions.r.ec2_hour]\n"c5.large" = "1"', r"c5\.large must be a number >= 0, got '1'"),
        ('[regions.r.ec2_hour]\n"c5.large" = -1', "must be a number >= 0, got -1"),
        ('[regions.r.ec2_hour]\n"c5.large" = true', "must be a number >= 0, got True"),
        ('[regions.r.ec2_hour]\n"c5.large" = nan', "must be a number >= 0, got nan"),
        ("[regions.r.ec2_hour]\nc5.large = 1", r"regions\.r\.ec2_hour\.c5 must be a number"),
        ("dated = 2027-01-01", "dated must be text"),
        ("regions = 1", "regions must be a table, got 1"),
        ('currency = "USD"', "say when they are from"),
        ("dated", "not valid TOML"),
    ],
)
def test_what_a_file_of_prices_must_not_be(own, text, message):
    with pytest.raises(InputError, match=message):
        load_prices(own(text))


def test_a_missing_file(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        load_prices(tmp_path / "none.toml")


# ---- what is billed ----


@pytest.mark.parametrize(
    ("seconds", "billed"),
    [
        (0.0, 0.0),
        (0.0101, 0.011),
        (0.010, 0.010),
        (0.007, 0.007),
        (1.0001, 1.001),
        (1e-9, 0.001),
        (2e-6, 0.001),
    ],
)
def test_lambda_bills_whole_milliseconds(seconds, billed):
    assert billed_seconds(seconds) == billed


def test_gb_seconds():
    assert gb_seconds(1769, 0.1234) == pytest.approx(1769 / 1024 * 0.124, rel=1e-15)
    assert gb_seconds(1024, 0.2 + 0.0004) == pytest.approx(0.201, rel=1e-15)  # a start of 0.2 s in it


def test_cost_by_hand():
    """Eight c5n.2xlarge and two m5.large for half an hour; 3 million calls of 2 GB-seconds on x86."""
    bill = Bill(load_prices(), Fleet(8, 2, "c5n.2xlarge", "m5.large"))
    cost = bill.cost(1800.0, gb_seconds=6e6, requests=3_000_000)
    assert cost.graph_servers == pytest.approx(8 * 0.432 / 2, rel=1e-12)  # 1.728
    assert cost.parameter_servers == pytest.approx(0.096, rel=1e-12)
    assert cost.lambda_compute == pytest.approx(100.0002, rel=1e-12)
    assert cost.lambda_requests == pytest.approx(0.60, rel=1e-12)
    assert cost.total == pytest.approx(102.4242, rel=1e-12)
    assert bill.not_priced() == ""


def test_arm_is_a_fifth_cheaper():
    bill = Bill(load_prices(), Fleet(1, graph_type="c7g.large", architecture="arm64"))
    assert bill.cost(0.0, gb_seconds=1e6).lambda_compute == pytest.approx(13.3334, rel=1e-12)


def test_without_a_type_there_is_no_price_and_no_total():
    bill = Bill(load_prices(), Fleet(2, 1, parameter_type="c5.large"))
    cost = bill.cost(3600.0, gb_seconds=60_000.0, requests=10)
    assert cost.graph_servers is None
    assert cost.total is None
    assert cost.priced == pytest.approx(0.085 + 1.000002 + 2e-6, rel=1e-12)
    assert bill.not_priced() == "no price for graph servers: no instance type was given"
    assert Bill(load_prices(), Fleet(1, 1)).not_priced().startswith("no price for graph servers and param")


def test_no_parameter_servers_cost_nothing_without_a_type():
    cost = Bill(load_prices(), Fleet(1, 0, "c5.large")).cost(3600.0)
    assert (cost.parameter_servers, cost.total) == (0.0, pytest.approx(0.085))


def test_a_type_without_a_price_is_refused_at_once():
    with pytest.raises(InputError, match="c5n.2xlarge"):
        Bill(load_prices(), Fleet(1, graph_type="c5n.2large"))


def test_keys_of_the_summary():
    bill = Bill(load_prices(), Fleet(1, 0, "c5.large"))
    summary = bill.summary(bill.cost(3600.0, gb_seconds=1.0, requests=1_000_000))
    assert summary == {
        "graph_servers": pytest.approx(0.085),
        "parameter_servers": 0.0,
        "lambda_compute": pytest.approx(1.66667e-5),
        "lambda_requests": pytest.approx(0.2),
        "total": pytest.approx(0.2850166667),
        "currency": "USD",
        "prices_dated": "2026-11",
    }
    json.dumps(summary, allow_nan=False)


# ---- while a run goes on ----


def test_a_meter_gives_each_epoch_its_share_and_adds_up():
    meter = Meter(Bill(load_prices(), Fleet(1, 0, "c5.large")))
    first = meter.advance(36.0, gb_seconds=600.0, requests=100)
    second = meter.advance(46.0, gb_seconds=600.0, requests=150)
    assert first.total == pytest.approx(0.00085 + 0.01000002 + 0.00002, rel=1e-12)
    assert second == Cost(pytest.approx(0.085 * 10 / 3600), 0.0, 0.0, pytest.approx(50 * 0.2e-6, rel=1e-12))
    assert meter.total.total == pytest.approx(first.total + second.total, rel=1e-12)
    assert meter.total.priced == pytest.approx(meter.bill.cost(46.0, gb_seconds=600.0, requests=150).priced)


def test_a_meter_without_a_price_goes_on():
    meter = Meter(Bill(load_prices(), Fleet(1)))
    assert meter.advance(10.0, requests=1_000_000).total is None
    assert meter.advance(20.0, requests=2_000_000).priced == pytest.approx(0.2)
    assert (meter.total.total, meter.total.priced) == (None, pytest.approx(0.4))


def test_a_meter_refuses_counters_that_shrink():
    meter = Meter(Bill(load_prices(), Fleet(1)))
    meter.advance(10.0, requests=5)
    with pytest.raises(ValueError, match="only grow"):
        meter.advance(11.0, requests=4)


def test_value():
    assert value(200.0, 0.5) == pytest.approx(0.01)
    assert value(100.0, 0.5) == 2 * value(200.0, 0.5)
    assert [value(10.0, None), value(10.0, 0.0), value(0.0, 1.0)] == [None, None, None]


def test_prices_are_in_the_package():
    assert '"prices.toml"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")

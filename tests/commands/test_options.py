"""What a command declares of its options agrees with the records that it makes of them."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from moexport.bench.request import BenchRequest, ReportRequest
from moexport.cli import COMMANDS
from moexport.commands.options import options_of
from moexport.commands.program import declared_command
from moexport.common.option import PANELS, Request, declared, flags
from moexport.exporter.options import ExportOptions
from moexport.exporter.requests import (
    BuildRequest,
    CalibrateRequest,
    InspectRequest,
    LoadRequest,
    RunRequest,
    VerifyRequest,
)
from moexport.exporter.tensorrt.options import EngineOptions
from moexport.plugins.demo.request import DemoRequest
from moexport.plugins.own_layers.first_adapter.request import AdaptRequest
from moexport.plugins.studies.request import SpecialiseRequest
from moexport.plugins.text.request import GenerateRequest, ServeRequest
from moexport.plugins.triton.request import TritonRequest
from moexport.plugins.tune.request import TuneRequest
from moexport.tests.command import run

RECORDS: dict[str, tuple[type[Any], ...]] = {
    "inspect": (InspectRequest,),
    "export": (LoadRequest, ExportOptions, EngineOptions),
    "build": (BuildRequest, EngineOptions),
    "calibrate": (LoadRequest, CalibrateRequest),
    "verify": (VerifyRequest,),
    "run": (RunRequest,),
    "bench": (BenchRequest,),
    "report": (ReportRequest,),
    "doctor": (),
    "adapt": (AdaptRequest,),
    "demo": (DemoRequest,),
    "generate": (GenerateRequest,),
    "serve": (ServeRequest,),
    "specialise": (LoadRequest, SpecialiseRequest),
    "triton": (TritonRequest,),
    "tune": (LoadRequest, TuneRequest),
}
"""The records that each command makes."""

WITHOUT_A_RECORD = {
    "inspect": {"model", "trust_engine"},
    "export": {"model", "output", "dry_run"},
    "build": {"bundle", "expose_routing", "dry_run"},
    "calibrate": {"model", "data", "output", "sensitivity"},
    "verify": {"bundle"},
    "run": {"bundle", "input_file", "output"},
    "bench": {"models", "output", "compare", "fail_if_slower"},
    "report": {"results", "output"},
    "adapt": {"force", "layer", "output"},
    "demo": {"output"},
    "generate": {"bundle", "prompt"},
    "serve": {"bundle"},
    "specialise": {"models", "data", "output"},
    "triton": {"bundles", "output"},
    "tune": {"model", "data", "output", "dry_run"},
}
"""What a shell has beside the options of records: arguments, and what becomes of the result."""

EVERYWHERE = {"as_json", "verbose", "quiet"}


def records_of(name: str) -> list[type[Any]]:
    """The records of a command, and those of the plugins that add to it."""
    own = RECORDS[name]
    calls = {call for record in own if issubclass(record, Request) for call in record.offered}
    panels = (panel for panel in PANELS if not calls.isdisjoint(panel.calls))
    return [*own, *(panel.options for panel in panels)]


def test_the_table_has_every_command() -> None:
    assert set(COMMANDS.names) == RECORDS.keys()


@pytest.mark.parametrize("name", RECORDS)
def test_an_option_of_a_command_has_the_spelling_and_the_default_of_its_record(name: str) -> None:
    parameters: dict[str, Any] = {p.name: p for p in declared_command(COMMANDS[name]).params}
    known: set[str] = set()
    for record in records_of(name):
        for option, (field, said) in declared(record).items():
            if said.flag is not None:
                known.add(option)
                parameter = parameters[option]
                spelled = [*parameter.opts, *parameter.secondary_opts]
                assert spelled == flags(record, option), option
                assert parameter.default == (None if field.default == () else field.default), option
    assert parameters.keys() - known - EVERYWHERE == WITHOUT_A_RECORD.get(name, set())


@pytest.mark.parametrize("record", sorted({r for rs in RECORDS.values() for r in rs}, key=str))
def test_options_of_a_record_are_handed_to_it_by_name(record: type[Any]) -> None:
    names = [name for name, (_, said) in declared(record).items() if said.flag is not None]
    make = options_of(record)
    assert [*inspect.signature(make).parameters] == names
    assert make(**dict.fromkeys(names)) == record()
    for name, value in {"k": "3", "threads": 2, "force": True, "sets": ["a=1"]}.items():
        if name in names:
            assert getattr(make(**dict.fromkeys(names) | {name: value}), name) == value


SEVERAL_TIMES = {"force", "threads"}
"""Options of one line that records have which share nothing else."""


def test_what_several_records_ask_alike_is_declared_once() -> None:
    records = {each for name in RECORDS for record in records_of(name) for each in record.__mro__}
    found = Counter(
        (name, said.help, said.unset, str(field.default))
        for record in records
        if is_dataclass(record)
        for name, (field, said) in declared(record).items()
        if name in inspect.get_annotations(record)
    )
    assert {name for (name, *_), times in found.items() if times > 1} == SEVERAL_TIMES


def test_an_option_without_a_record_of_its_own_has_the_words_of_one() -> None:
    """Of engines alone: `export` has the graph's."""
    (option,) = (
        each for each in declared_command(COMMANDS["build"]).params if each.name == "expose_routing"
    )
    field, said = declared(EngineOptions)["expose_routing"]
    assert (option.help, option.default) == (said.help, field.default)


def test_export_has_no_more_options_of_its_own_than_two_screens_show() -> None:
    """32 with --help: those of engines are a group, and those of plugins come by panels."""
    own = declared_command(replace(COMMANDS["export"], calls=())).params
    own = [each for each in own if each.name not in declared(EngineOptions)]
    assert len([each for each in own if each.param_type_name == "option"]) + len(["--help"]) <= 32


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--workspace", "9" * 5000 + "GiB"),
        ("--weight-streaming", "9" * 5000),
        ("--compute-capability", "9" * 5000 + ".9"),
    ],
)
def test_a_number_of_thousands_of_digits_is_no_defect(
    option: str, value: str, bundle: Path
) -> None:
    outcome = run("build", bundle, "--target", "tensorrt-rtx", option, value)
    assert outcome.code == 2
    assert option in outcome.error

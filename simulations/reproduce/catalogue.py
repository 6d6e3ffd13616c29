"""Everything that can be run again, by name."""

from __future__ import annotations

from simulations.reproduce.entry import Entry
from simulations.reproduce.papers import (
    driving2018,
    dynamic2018,
    gems2018,
    gems2019,
    gems2019_checks,
    multi_model2025,
    protocol_grid,
    slides2025,
)
from simulations.reproduce.papers.spec import Reproduction
from simulations.reproduce.studies.study import Study

PAPERS: dict[str, Reproduction] = {
    each.name: each
    for module in (
        gems2019,
        gems2019_checks,
        gems2018,
        dynamic2018,
        driving2018,
        protocol_grid,
        slides2025,
        multi_model2025,
    )
    for each in module.REPRODUCTIONS
}

STUDIES: dict[str, Study] = {
    each.name: each
    for each in (
        Study(
            name="demo",
            about="Several ways of federated learning compared on the same digits; a report.",
            minutes=1,
            seeds=3,
            module="simulations.reproduce.demo",
        ),
        Study(
            name="frontier",
            about="What does a byte buy? All methods on one split, FedAvg's family tuned.",
            minutes=30,
            quick=("rounds=20",),
        ),
        Study(
            name="honest_radii",
            about="Are radii honest? Sampled, worst-direction and certified ones beside what they "
            "promise.",
            minutes=1,
            quick=("train.epochs=10",),
        ),
        Study(
            name="layer_size",
            about="How many hidden neurons does it take? Accuracy against size, beside ensembles.",
            where="GEMS 2019, Tables 3 and 9 to 11",
            minutes=3,
            seeds=3,
            quick=("train.epochs=15",),
        ),
        Study(
            name="leaks",
            about="What do class moments give away? Rebuilt samples, and who is among them.",
            minutes=2,
        ),
        Study(
            name="hostile",
            about="What can a hostile node do to balls and cones, with and without a defence?",
            minutes=3,
            seeds=3,
        ),
        Study(
            name="hostile_models",
            about="What can a hostile node do to averages and merged layers, with and without a "
            "defence?",
            minutes=10,
        ),
        Study(
            name="differences",
            about="Why some numbers differ from the papers': the experiments behind the sentences.",
            where="GEMS 2019, Tables 1, 2, 5 and 6",
            minutes=5,
        ),
        Study(
            name="multi_model_rates",
            about="Learning rates for several models at once, chosen without the test data.",
            where="Slides 2025, Table I",
            minutes=8,
            quick=("rounds=2",),
        ),
        Study(
            name="fedavg_rates",
            about="Learning rates for FedAvg's table, searched on validation data as McMahan et "
            "al. did.",
            where="Slides 2025, Table 1",
            minutes=4,
            quick=("rounds=2",),
        ),
        Study(
            name="fedavg_causes",
            about="Why FedAvg needs other numbers of rounds than published: rate, initial weights, "
            "examples.",
            where="Slides 2025, Table 1",
            minutes=4,
            seeds=3,
            quick=("rounds=3",),
        ),
        Study(
            name="compressed_streams",
            about="Does compression cost loss? Protocols in float32, int8 and int4 on three "
            "streams, bytes at equal loss.",
            where="Dynamic averaging 2018, Section 5",
            minutes=250,
            seeds=3,
            quick=("rounds=40", "evaluate_every=40"),
        ),
        Study(
            name="merged_networks",
            about="What are the peers worth on convolutional networks? LeNets averaged, merged by "
            "RegMean, Fisher matrices and FedFisher, and GEMS beside them.",
            where="FedFisher 2024",
            minutes=35,
            seeds=3,
            quick=("train.epochs=2", "steps=500", "dataset.public=54000"),
        ),
        Study(
            name="soak",
            about="Does a long run stay small? Memory over 200 rounds on Ray with failing nodes.",
            minutes=5,
            quick=("rounds=40",),
        ),
    )
}

CATALOGUE: dict[str, Entry] = {**PAPERS, **STUDIES}

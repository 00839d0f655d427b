"""What notebooks show of plans, diagnoses, data sets, jobs and explanations: small tables, escaped."""

import subprocess
import sys
from html.parser import HTMLParser

import pytest

import frostline as fl
from frostline.planning.replanning import Diagnosis
from support.images import image_folder
from support.pages import HOSTILE, runs_nothing
from support.plans import a_costless_plan, a_plan


class Cells(HTMLParser):
    """The texts of a table's caption and cells."""

    def __init__(self, table):
        super().__init__()
        self.texts = []
        self.feed(table)

    def handle_data(self, data):
        self.texts.append(data)


def shown(value):
    table = value._repr_html_()
    assert table.startswith("<table>")
    assert runs_nothing(table)
    return "".join(f"{text}\n" for text in Cells(table).texts)


@pytest.fixture
def folder(tmp_path):
    return image_folder(tmp_path / "images", per_class=2)


def test_a_plan_says_its_ways_its_rate_and_what_holds_it_back():
    plan = a_plan()
    assert repr(plan) == "Plan(55.3 % cut 0, 44.7 % cut 24: 72.35 samples/s, held back by store cpu)"
    for words in ("cut 0 (encoded image), exact", "cut 24 (blocks.24.bn2), sparse", "72.35 samples/s", plan.reason):
        assert words in shown(plan)
    assert "no bound," in repr(a_costless_plan())


def test_a_diagnosis_says_what_helps_and_how_busy_each_part_is():
    said = shown(
        Diagnosis(held_back_by="the link", says="it is full", mend="widen it", gain=2.5, shares={"the link": 0.93})
    )
    for words in ("Diagnosis(held back by the link, 2.5 × without it)", "it is full", "widen it", "93.0 %"):
        assert words in said


def test_a_data_set_is_not_listed_for_being_shown(folder, tmp_path):
    # Listing it would raise.
    assert "not listed yet" in shown(fl.Dataset(tmp_path / "nothing"))
    data = fl.Dataset(folder)
    assert len(data) == 6
    for words in (repr(data), "6", "3 classes", "circle, noise, stripe"):
        assert words in shown(data)


def test_a_job_and_its_explanation_say_where_the_work_is(folder):
    with fl.offload(None, fl.Dataset(folder), preprocess=fl.preprocess.imagenet(32)) as job:
        said, explained = shown(job), job.explain()
        assert repr(job) in said
        assert all(part in said and at in said for part, at in job.where)
        assert job.where
        for words in (explained.diagnosis.says, "nothing yet", *(at for _, at in explained.where)):
            assert words in shown(explained)
        assert repr(explained).startswith("Explanation(")


def test_names_bring_no_markup():
    plan = a_plan(1, names={1: HOSTILE, 0: HOSTILE})
    assert "<script>" not in plan._repr_html_()
    assert runs_nothing(Diagnosis(held_back_by=HOSTILE, says=HOSTILE, shares={HOSTILE: 1.0})._repr_html_())


@pytest.mark.usefixtures("plain_starts")
def test_tables_need_no_library():
    imported = "{'jinja2', 'torch', 'matplotlib', 'rich'} & set(sys.modules)"
    script = f"import sys; import frostline.core.nouns; print(len({imported}))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "0"

"""Which classes were taken for which: counted in the pass that scores, and shown on the report's page."""

import io
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import confusion_matrix

import frostline as fl
from frostline.core.events import Evaluated, StepFinished
from frostline.training.objective import ConfusionTally
from frostline.training.recipe import ConfusedPair, Confusion, Mistake
from frostline.training.report.page import names_of, render_page, thumbnails
from frostline.training.report.report import Record
from frostline.wire.recipes import Recipe
from support.loops import a_loop
from support.pages import HOSTILE, browse, has_every_target_once, has_inline_pictures_alone
from support.reports import a_report
from support.trainings import ignore


def counted(scores, labels, size=7):
    tally = ConfusionTally()
    ids = torch.arange(len(labels)) + 1000
    for place in range(0, len(labels), size):
        rows = slice(place, place + size)
        tally.add(scores[rows], labels[rows], ids[rows])
    return tally.value


def drawn(samples, classes):
    draw = torch.Generator().manual_seed(0)
    return torch.randn(samples, classes, generator=draw), torch.randint(classes, (samples,), generator=draw)


def test_counts_over_batches_are_those_of_scikit_learn_over_all_samples():
    scores, labels = drawn(200, 6)
    found = counted(scores, labels)
    expected = confusion_matrix(labels, scores.argmax(1), labels=range(6))
    np.testing.assert_array_equal(found.matrix, expected)
    assert found.samples == 200
    assert found.wrong == 200 - expected.trace()
    np.fill_diagonal(expected, 0)
    assert found.pairs[0].samples == expected.max()
    assert [pair.samples for pair in found.pairs] == sorted((pair.samples for pair in found.pairs), reverse=True)
    assert all(expected[pair.true, pair.said] == pair.samples for pair in found.pairs)


def test_keeps_the_mistakes_that_were_said_with_most_confidence_and_no_more_than_24():
    scores, labels = drawn(400, 5)
    found = counted(scores, labels)
    said, confidence = scores.argmax(1), scores.softmax(1).amax(1)
    wrong = sorted((float(confidence[row]) for row in range(400) if said[row] != labels[row]), reverse=True)
    assert [mistake.confidence for mistake in found.mistakes] == pytest.approx(wrong[:24])
    for mistake in found.mistakes:
        row = mistake.id - 1000
        assert (mistake.true, mistake.said) == (int(labels[row]), int(said[row]))
        assert mistake.true != mistake.said


def test_memory_stays_bounded_for_many_classes_and_scores_that_are_no_numbers():
    scores, labels = drawn(60, 300)
    found = counted(scores, labels)
    assert found.matrix == ()
    assert len(found.pairs) == 20
    scores, labels = drawn(30, 2000)
    found = counted(scores, labels)
    assert (found.matrix, found.pairs) == ((), ())
    assert len(found.mistakes) == 24
    found = counted(torch.full((5, 3), torch.nan), torch.ones(5, dtype=torch.int64))
    assert found.samples == 5
    assert all(mistake.confidence == 0 for mistake in found.mistakes)


@pytest.mark.parametrize("recipe", [Recipe(learning_rate=0.1), Recipe(epochs=3, learning_rate=0.1)])
def test_they_are_those_of_the_head_that_is_kept_and_need_no_pass_of_their_own(recipe):
    record, passes = Record(ignore), []

    def on_event(event):
        record(event)
        passes.extend([event] if isinstance(event, Evaluated) else [])

    loop, head, (features, labels) = a_loop(recipe, on_event)
    loop.run()
    head.eval()
    with torch.no_grad():
        said = head(features).argmax(1)
    np.testing.assert_array_equal(loop.confusion.matrix, confusion_matrix(labels, said, labels=range(10)))
    right = loop.confusion.samples - loop.confusion.wrong
    assert right / loop.confusion.samples == pytest.approx(record.kept_scores["accuracy"])
    assert len(passes) == len(record.epoch_losses)


def test_a_run_that_ends_before_anything_is_scored_has_none():
    def stop(event):
        if isinstance(event, StepFinished):
            raise KeyboardInterrupt

    loop, _, _ = a_loop(Recipe(), stop)
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert loop.confusion is None


def a_confusion(classes, *, name="glass/7.jpg"):
    matrix = tuple(tuple(30 if row == column else row + 1 for column in range(classes)) for row in range(classes))
    return Confusion(
        samples=sum(map(sum, matrix)),
        wrong=sum(map(sum, matrix)) - 30 * classes,
        matrix=matrix,
        pairs=(ConfusedPair(true=1, said=0, samples=9), ConfusedPair(true=0, said=1, samples=3)),
        mistakes=(
            Mistake(id=5, name=name, true=1, said=0, confidence=0.973),
            Mistake(id=6, name="metal/2.jpg", true=0, said=1, confidence=0.61),
        ),
    )


def a_picture():
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), (200, 30, 30)).save(buffer, "JPEG")
    return buffer.getvalue()


def test_the_page_has_a_matrix_and_the_samples_with_their_pictures():
    report = a_report(confusion=a_confusion(6))
    page = render_page(report, {5: "data:image/jpeg;base64,AAAA"})
    [table] = re.findall(r'<table class="matrix">.*?</table>', page, re.DOTALL)
    rows = re.findall(r"<tr><th scope=\"row\">.*?</tr>", table)
    assert [row.count('class="right"') for row in rows] == [1] * 6
    assert [re.findall(r">(\d+)</td>", row) for row in rows] == [list(map(str, row)) for row in report.confusion.matrix]
    assert "glass/7.jpg" in page
    assert "said cardboard, 97.3 %" in page
    assert page.count("<img") == 1
    assert has_inline_pictures_alone(page)
    assert has_every_target_once(page)


def test_of_many_classes_the_page_has_the_pairs():
    classes = tuple(f"breed {number}" for number in range(21))
    page = render_page(a_report(classes=classes, confusion=a_confusion(21)))
    assert 'class="matrix"' not in page
    assert re.search(r"breed 1</th><td[^>]*>breed 0</td>.*?>9</td>", page)


def test_classes_without_names_have_their_numbers():
    assert "class 1" in render_page(a_report(classes=(), confusion=a_confusion(3)))


def test_names_of_samples_and_classes_bring_no_markup():
    page = render_page(a_report(classes=(HOSTILE, HOSTILE), confusion=a_confusion(2, name=HOSTILE)))
    assert "<script" not in page
    assert "<img" not in page


def test_the_report_s_file_has_the_matrix_and_the_mistakes():
    confusion = json.loads(json.dumps(a_report(confusion=a_confusion(3)).to_json()))["confusion"]
    assert confusion["matrix"] == [[30, 1, 1], [2, 30, 2], [3, 3, 30]]
    assert confusion["mistakes"][0]["name"] == "glass/7.jpg"


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "data"
    for number in range(6):
        (folder / f"c{number % 2}").mkdir(parents=True, exist_ok=True)
        (folder / f"c{number % 2}" / f"{number}.jpg").write_bytes(a_picture() if number else b"no image")
    return fl.Dataset(folder)


def test_pictures_are_small_in_the_given_order_and_left_out_of_what_is_no_image(images):
    ids = images.samples.ids.tolist()[::-1]
    found = thumbnails(images, ids)
    broken = {id for id, name in names_of(images, ids).items() if name.endswith("0.jpg")}
    assert list(found) == [id for id in ids if id not in broken]
    assert len(broken) == 1
    assert all(len(picture) < 16_100 for picture in found.values())
    assert list(thumbnails(images, ids[:2])) == ids[:2]


def test_no_picture_is_read_after_the_time_or_from_a_store_that_is_gone(images, tmp_path):
    ids = images.samples.ids.tolist()
    seconds = iter([0.0, *(float(second) for second in range(100))])
    assert len(thumbnails(images, ids, max_s=2.5, clock=lambda: next(seconds))) <= 3
    (tmp_path / "data").rename(tmp_path / "moved")
    assert thumbnails(images, ids) == {}


def test_where_a_node_listed_the_data_names_are_known_and_nothing_is_read(images, shared_node):
    listed = fl.Dataset(images.url, near=shared_node.url)
    ids = listed.samples.ids.tolist()
    assert sorted(names_of(listed, ids).values()) == sorted(images.names)
    assert thumbnails(listed, ids) == {}
    assert len(thumbnails(images, images.samples.ids.tolist())) == 5


def test_a_browser_shows_the_pictures(tmp_path, images):
    ids = images.samples.ids.tolist()
    pictures = dict(zip((5, 6), thumbnails(images, ids).values(), strict=False))
    page = render_page(a_report(confusion=a_confusion(6)), pictures)
    # The browser runs no script of a page with this policy, so that the question goes into a copy without it.
    asking = re.sub(r"<meta http-equiv=[^>]*>", "", page).replace(
        "</body>",
        "<script>onload = () => document.title = [...document.images].map(image => image.naturalWidth)</script></body>",
    )
    assert "<title>64,64</title>" in browse(tmp_path, asking, "--dump-dom")
    size = browse(tmp_path, page, "--dump-dom")
    assert "img-src data:" in size

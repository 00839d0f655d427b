"""How amounts are said to people: bytes, seconds, rates and shares in few digits, with their unit.

How text from outside is said to them: without what a terminal, or a log, would take for an order.
"""

import inspect
import logging
import math
import re
import warnings
from pathlib import Path

__all__ = (
    "METRICS",
    "cut_for_log",
    "in_bytes",
    "in_multiple",
    "in_percent",
    "in_rate",
    "in_samples_per_s",
    "in_score",
    "in_seconds",
    "in_times",
    "log_named",
    "metric_name",
    "printable",
    "printable_logs",
    "warn_caller",
)

METRICS = {
    "accuracy": "accuracy",
    "mae": "mean absolute error",
    "rmse": "root mean squared error",
    "macro_f1": "macro-F1",
    "auroc": "area under the ROC curve",
}
"""The names of scores, in words."""

_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")


def in_bytes(count: float) -> str:
    """Decimal units and three digits: ``"512 B"``, ``"1.28 MB"``, ``"154 GB"``; ``"no bound"`` for infinity."""
    if math.isinf(count):
        return "no bound"
    power = 0
    while count >= 999.5 and power < len(_BYTES) - 1:
        count /= 1000
        power += 1
    return f"{count:.0f} B" if power == 0 else f"{_three_digits(count)} {_BYTES[power]}"


def in_seconds(seconds: float) -> str:
    """The unit a person would choose: ``"850 µs"``, ``"12.5 ms"``, ``"41.3 s"``, ``"3 min 20 s"``, ``"2 h 5 min"``."""
    if seconds <= 0:
        return "0 s"
    if seconds < 0.9995e-3:
        return f"{_three_digits(seconds * 1e6)} µs"
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1e3)} ms"
    if seconds < 99.95:
        return f"{_three_digits(seconds)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def in_rate(per_s: float) -> str:
    """Things a second, in four digits: ``"48.12"``, ``"1920"``; ``"no bound"`` for infinity."""
    if math.isinf(per_s):
        return "no bound"
    return f"{per_s:.0f}" if per_s >= 1000 else f"{per_s:.4g}"


def in_samples_per_s(per_s: float) -> str:
    """A rate of samples with its unit: ``"48.12 samples/s"``; ``"no bound"`` alone for infinity."""
    return in_rate(per_s) if math.isinf(per_s) else f"{in_rate(per_s)} samples/s"


def in_percent(share: float) -> str:
    """A share between 0 and 1 with one decimal: ``"83.7 %"``."""
    return f"{share * 100:.1f} %"


def in_score(metric: str, value: float | None) -> str:
    """The value of a score: a share for accuracies, four digits for others; a dash where there is none."""
    if value is None:
        return "–"
    return in_percent(value) if metric == "accuracy" else f"{value:.4g}"


def in_times(ratio: float | None) -> str:
    """A ratio: ``"46 ×"``, ``"3.2 ×"``; a dash where there is none."""
    if ratio is None:
        return "–"
    return f"{ratio:,.0f} ×" if ratio >= 9.95 else f"{ratio:.1f} ×"


def in_multiple(ratio: float) -> str:
    """How many times as much, to stand before the word: ``"1.6"``, ``"20"``, ``"4,683"``; never an exponent."""
    return f"{ratio:,.0f}" if ratio >= 99.95 else f"{ratio:.3g}"


def metric_name(field: str) -> str:
    """The name of a figure as Prometheus has it, with the unit's whole name: ``"busy_seconds"`` of ``busy_s``."""
    return f"{field.removesuffix('_s')}_seconds" if field.endswith("_s") else field


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


# Controls of terminals and lines, what turns the direction of writing or cannot be seen, and halves of characters. What
# joins letters of some scripts, and parts of pictures, stays.
_ORDERS = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    r"""The same text on one line, with escapes such as ``\x1b`` for what a terminal would not show but follow.

    Whatever comes from outside goes through it on its way to a terminal or a log: names of files, classes and columns,
    what nodes and stores say, errors. Text that went through it already stays as it is.
    """
    if text.isprintable():
        return text
    return _ORDERS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


# Characters of a text in a log: tracebacks are shorter, and what comes from outside may be as long as it likes.
_MAX_LOGGED = 16_384


def cut_for_log(text: str) -> str:
    """The same text, or the first 16,384 characters of a longer one and how many more there were."""
    more = len(text) - _MAX_LOGGED
    return text if more <= 0 else f"{text[:_MAX_LOGGED]} ... ({more:,} characters more)"


class _PrintableSentences(logging.Filter):
    """Lets everything through, with what it says on one line and printable."""

    def filter(self, record: logging.LogRecord) -> bool:
        """See ``logging.Filter``."""
        said = record.getMessage()
        if not said.isprintable():
            record.msg, record.args = printable(said), None
        return True


_PRINTABLE = _PrintableSentences()


def log_named(name: str) -> logging.Logger:
    """The logger of that name, whose sentences are printable whoever has set logging up.

    Args:
        name: name as ``logging`` has it, such as ``frostline.node``.
    """
    found = logging.getLogger(name)
    found.addFilter(_PRINTABLE)
    return found


class _Printable(logging.Formatter):
    """One line for what is said, and one for each line of a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        said = printable(cut_for_log(record.getMessage()))
        if not record.exc_info:
            return said
        lines = cut_for_log(self.formatException(record.exc_info)).splitlines()
        return "\n".join((said, *map(printable, lines)))


def printable_logs() -> None:
    """Have what ``logging`` says where nobody has set it up, on stderr, be printable."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Printable())


_PACKAGE = str(Path(__file__).parents[1])


def warn_caller(text: str) -> None:
    """Warn printably, at the line of code that called Frostline, through however many of its functions."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(printable(text), stacklevel=level)

"""How values look in notebooks: a small table of names and texts, escaped, without any library."""

from collections.abc import Iterable
from html import escape

__all__ = ("ShownInNotebooks",)


class ShownInNotebooks:
    """Adds the method that notebooks ask for; a class of this kind says its rows."""

    __slots__ = ()

    def _rows(self) -> Iterable[tuple[str, object]]:
        """Names and values to show under the text of ``repr``; made without reading or asking anything."""
        return ()

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th scope="row" style="text-align: left">{escape(name)}</th>'
            f'<td style="text-align: left">{escape(str(value))}</td></tr>'
            for name, value in self._rows()
        )
        caption = f'<caption style="text-align: left">{escape(repr(self))}</caption>'
        return f"<table>{caption}<tbody>{rows}</tbody></table>"

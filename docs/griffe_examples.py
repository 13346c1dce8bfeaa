"""For the API pages: docstrings head their examples `Example:`, which the reader of docstrings knows as `Examples:`."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the section: its `>>>` lines are shown as code."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )

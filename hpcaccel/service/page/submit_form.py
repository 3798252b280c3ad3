"""The form of a spec: inputs made from the JSON Schema, and the values between inputs and YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dash_mantine_components as dmc
from dash import html

from hpcaccel.errors import UserError
from hpcaccel.service.page.submit_fields import FormField, FormSection
from hpcaccel.service.page.submit_yaml import flow_text, value_from_text

__all__ = ["FIELD", "form", "input_value", "spec_value"]

FIELD = "submit-field"
"""``type`` of the inputs' ids; ``path`` is the dotted path."""
YES_NO = ("yes", "no")


def form(sections: list[FormSection], values: Mapping[str, Any]) -> html.Div:
    """The inputs of all sections, with a spec's values."""
    first, *others = sections
    return html.Div(
        className="submit-form",
        children=[
            html.Div([_input(field, values) for field in first.fields], className="submit-fields"),
            dmc.Accordion(
                multiple=True,
                variant="separated",
                chevronPosition="left",
                className="submit-sections",
                children=[_section(section, values) for section in others],
            ),
        ],
    )


def _section(section: FormSection, values: Mapping[str, Any]) -> dmc.AccordionItem:
    title = [html.Span(section.name, className="submit-section-name"), html.Span(section.description)]
    return dmc.AccordionItem(
        value=section.name,
        children=[
            dmc.AccordionControl(html.Div(title, className="submit-section-title")),
            dmc.AccordionPanel(
                html.Div([_input(field, values) for field in section.fields], className="submit-fields")
            ),
        ],
    )


def _input(field: FormField, values: Mapping[str, Any]) -> Any:
    common = {
        "id": {"type": FIELD, "path": field.key},
        "label": field.key.partition(".")[2] or field.key,
        "description": field.description,
        "placeholder": field.placeholder,
        "size": "sm",
        "value": input_value(field, values),
        "className": "submit-input is-wide" if field.kind in ("value", "list") else "submit-input",
    }
    if field.kind in ("choice", "flag"):
        data = list(field.choices) if field.kind == "choice" else list(YES_NO)
        return dmc.Select(data=data, clearable=True, searchable=len(data) > 6, **common)
    if field.kind in ("integer", "number"):
        return dmc.NumberInput(allowDecimal=field.kind == "number", debounce=400, **common)
    if field.kind == "list":
        return dmc.TagsInput(splitChars=[","], **common)
    if field.kind == "value":
        return dmc.Textarea(debounce=600, autosize=True, minRows=1, maxRows=8, spellCheck=False, **common)
    return dmc.TextInput(debounce=400, **common)


def input_value(field: FormField, values: Mapping[str, Any]) -> Any:
    """The text in the input of a field, for a spec's values."""
    value: Any = values
    for key in field.path:
        value = value.get(key) if isinstance(value, Mapping) else None
    if field.kind == "list":
        if value is None:
            return []
        return [str(item) for item in value] if isinstance(value, list) else [str(value)]
    if value is None:
        return None if field.kind in ("choice", "flag") else ""
    if field.kind == "flag":
        return {True: "yes", False: "no"}.get(value) if isinstance(value, bool) else None
    if field.kind in ("integer", "number"):
        return value if isinstance(value, int | float) and not isinstance(value, bool) else ""
    if field.kind == "choice":
        return str(value) if str(value) in field.choices else None
    return value if isinstance(value, str) else flow_text(value)


def spec_value(field: FormField, shown: Any) -> Any:
    """The value for the spec of what was entered; None if the field was cleared.

    Raises:
        UserError: the text of a list or mapping is not valid YAML.
    """
    if shown is None or shown == "" or shown == []:
        return None
    if field.kind == "flag":
        return shown == "yes"
    if field.kind == "integer":
        return _number(field, shown, int)
    if field.kind == "number":
        return _number(field, shown, float)
    if field.kind in ("value", "scalar"):
        return value_from_text(str(shown))
    return shown


def _number(field: FormField, shown: Any, kind: type[int] | type[float]) -> int | float:
    try:
        number = kind(shown)
    except (TypeError, ValueError):
        raise UserError(f"{field.key} {shown!r} is not a number") from None
    return int(number) if number == int(number) else number

"""The one dialog that asks before an action, and the actions: every button that changes something opens it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import dash_mantine_components as dmc
from dash import ALL, Dash, Input, Output, State, ctx, dcc, html, no_update

from hpcaccel.errors import HpcaccelError
from hpcaccel.service.client import Client
from hpcaccel.service.page.client_calls import ClientCalls

__all__ = ["ACTIONS", "Action", "button", "parts", "register"]

SHOWN = 8
"""So many names the dialog lists; then the number of the others."""


@dataclass(frozen=True, kw_only=True)
class Action:
    """Something that a button does after the user has agreed."""

    label: str
    """On the button."""
    question: str
    """The dialog's title; ``{what}`` is the run's name, or the number of runs."""
    text: str
    """What will happen."""
    do: Callable[[Client, str], object]
    done: str
    """The notice afterwards."""
    danger: bool = False


ACTIONS = {
    "stop": Action(
        label="Stop",
        question="Stop {what}?",
        text="The ranks are asked to save and leave, and the job ends. Resume continues from the newest checkpoint.",
        do=lambda client, run: client.stop(run, "pause"),
        done="Stop requested",
    ),
    "requeue": Action(
        label="Requeue",
        question="Requeue {what}?",
        text="The ranks are asked to save and leave; the job returns to the queue and continues when it starts again.",
        do=lambda client, run: client.stop(run, "requeue"),
        done="Requeue requested",
    ),
    "finish": Action(
        label="Finish",
        question="Finish {what}?",
        text="The ranks are asked to end the loop; the code after it runs, and the run ends there.",
        do=lambda client, run: client.stop(run, "finish"),
        done="Finish requested",
    ),
    "save": Action(
        label="Save",
        question="Save a checkpoint of {what}?",
        text="All ranks save at their next step, and training continues.",
        do=lambda client, run: client.save(run),
        done="Save requested",
    ),
    "profile": Action(
        label="Profile",
        question="Profile {what}?",
        text="torch's profiler records the next 5 steps of rank 0 into the run directory, and training continues.",
        do=lambda client, run: client.profile(run, 5),
        done="Profile requested",
    ),
    "cancel": Action(
        label="Cancel",
        question="Cancel {what}?",
        text="The job ends now, without a save. Steps after the newest checkpoint are lost. Resume is possible later.",
        do=lambda client, run: client.cancel(run),
        done="Cancel requested",
        danger=True,
    ),
    "resume": Action(
        label="Resume",
        question="Resume {what}?",
        text="A new job is submitted. It continues from the newest checkpoint.",
        do=lambda client, run: client.resume(run),
        done="Submitted again",
    ),
    "stop_sweep": Action(
        label="Stop",
        question="Stop the sweep {what}?",
        text="Its running trials save and stop, and no further trials begin. Resume continues them.",
        do=lambda client, run: client.stop_sweep(run),
        done="Stop requested",
    ),
    "cancel_sweep": Action(
        label="Cancel",
        question="Cancel the sweep {what}?",
        text="Its workers end now, without a save. Results so far are kept.",
        do=lambda client, run: client.cancel_sweep(run),
        done="Cancel requested",
        danger=True,
    ),
    "resume_sweep": Action(
        label="Resume",
        question="Resume the sweep {what}?",
        text="New workers are submitted. They continue the stopped trials, and then the search.",
        do=lambda client, run: client.resume_sweep(run),
        done="Submitted again",
    ),
}


def button(action: str, run_id: str = "", name: str = "") -> html.Button:
    """A button that acts on one run after a confirmation; without ``run_id``, on the chosen rows of a table."""
    known = ACTIONS[action]
    return html.Button(
        known.label,
        id={"type": "ask", "action": action, "run": run_id, "name": name},
        className="button is-danger" if known.danger else "button",
    )


def parts() -> Sequence[Any]:
    """The dialog and the store of its state, for the frame."""
    return (
        dcc.Store(id="chosen", data=[]),  # [id, name] of each chosen row of a table
        dcc.Store(id="asked"),
        dmc.Modal(
            id="confirm",
            centered=True,
            zIndex=400,
            children=[
                html.P(id="confirm-text"),
                html.Ul(id="confirm-names", className="confirm-names"),
                html.P(id="confirm-error", className="error-text"),
                html.Div(
                    className="dialog-end",
                    children=[
                        html.Button("Keep as it is", id="confirm-no", className="button"),
                        html.Button("", id="confirm-yes", className="button is-main"),
                    ],
                ),
            ],
        ),
    )


def register(app: Dash, calls: ClientCalls) -> None:
    """Add the dialog's callbacks."""

    @app.callback(
        Output("confirm", "opened"),
        Output("confirm", "title"),
        Output("confirm-text", "children"),
        Output("confirm-names", "children"),
        Output("confirm-yes", "children"),
        Output("confirm-yes", "className"),
        Output("confirm-error", "children"),
        Output("asked", "data"),
        Input({"type": "ask", "action": ALL, "run": ALL, "name": ALL}, "n_clicks"),
        State("chosen", "data"),
        prevent_initial_call=True,
    )
    def ask(_: list[int | None], chosen: list[list[str]] | None) -> Any:
        source = ctx.triggered_id
        if not isinstance(source, dict) or not any(one["value"] for one in ctx.triggered):
            return (no_update,) * 8  # a page has just been shown; nothing was clicked
        runs = [[source["run"], source["name"]]] if source["run"] else chosen or []
        return question(source["action"], runs) if runs else (no_update,) * 8

    @app.callback(
        Output("confirm", "opened", allow_duplicate=True),
        Output("confirm-error", "children", allow_duplicate=True),
        Output("notices", "sendNotifications"),
        Output("tick", "data", allow_duplicate=True),
        Input("confirm-yes", "n_clicks"),
        State("asked", "data"),
        prevent_initial_call=True,
        running=[(Output("confirm-yes", "disabled"), True, False)],
    )
    async def act(clicked: int | None, asked: dict[str, Any] | None) -> Any:
        if not clicked or not asked:
            return (no_update,) * 4
        action = ACTIONS[asked["action"]]
        refused = []
        for run_id, name in asked["runs"]:
            try:
                await calls(lambda client, run_id=run_id: action.do(client, run_id))  # type: ignore[misc]
            except HpcaccelError as error:
                refused.append(f"{name}: {error}")
        done = len(asked["runs"]) - len(refused)
        notice = [_notice(action, asked["runs"], done)] if done else no_update
        return bool(refused), "\n".join(refused), notice, time.time()

    app.clientside_callback(
        "function () { return false; }",
        Output("confirm", "opened", allow_duplicate=True),
        Input("confirm-no", "n_clicks"),
        prevent_initial_call=True,
    )


def question(name: str, runs: list[list[str]]) -> tuple[Any, ...]:
    """The dialog's properties for an action on ``runs``, each an id and a name."""
    action = ACTIONS[name]
    what = runs[0][1] if len(runs) == 1 else f"{len(runs)} runs"
    names = [f"{shown} ({run_id})" for run_id, shown in runs[:SHOWN]] if len(runs) > 1 else []
    if len(runs) > SHOWN:
        names.append(f"and {len(runs) - SHOWN} more")
    look = "button is-danger-main" if action.danger else "button is-main"
    listed = [html.Li(one) for one in names]
    return (
        True,
        action.question.format(what=what),
        action.text,
        listed,
        action.label,
        look,
        "",
        {"action": name, "runs": runs},
    )


def _notice(action: Action, runs: list[list[str]], done: int) -> dict[str, Any]:
    what = runs[0][1] if len(runs) == 1 else f"{done} of {len(runs)} runs"
    return {
        "id": f"done-{time.time()}", "action": "show", "title": action.done, "message": what,
        "color": "red" if action.danger else "indigo", "autoClose": 6000,
    }  # fmt: skip

"""Parity: does the decoder's drafter say, position by position, what the training-time forward says on the same tokens?

1. An answer is decoded; for every round the drafter's logits are kept (`Trace`). Any decoder can fill one in.
2. The same tokens become a training row; the training-time forward gives the logits of every slot, laid at the position
   of the label that the slot is taught (`training_trace`).
3. The two are compared where both speak: same anchor, same position, whole blocks only.

A difference beyond tolerance is named by `name_fault`, which sees logits and artefacts (weights, config, target,
tokens, messages, template), never how they came about: a third forward (`whatif`), written out plainly, says which of
the two sides is off, and its switches are tried until one reproduces that side. Before logits, tokens are compared with
what training makes of the same messages, because no forward can be right on other tokens. Where both sides agree with
each other, the labels are looked at: drafts that name the token one place off were taught so.

Tolerance, in units of the spread (standard deviation) of a position's logits: 0.0005 in float32; in bfloat16 three
times what rounding does to the training-time forward itself, at least 0.02.

Cost: one decoding, one target forward and one drafter forward per answer; where something differs, some forty forwards
over at most 24 rounds of one answer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from draftsmith.blocks import Row
from draftsmith.data.conversations import Conversation
from draftsmith.data.template import Tokeniser
from draftsmith.decode.prompts import Prompt, encode_prompts, has_template
from draftsmith.decode.rounds import answer_limit
from draftsmith.drafter.model import DraftModel
from draftsmith.errors import UserError
from draftsmith.export.card import find_run
from draftsmith.export.traces import (
    RecordingProposer,
    Trace,
    compare,
    decoding_trace,
    difference,
    training_row,
    training_trace,
)
from draftsmith.export.whatif import NOTHING, Fault, block_logits, known_faults

Side = Literal["decoder", "training", "both", "data"]
FLOAT32_TOLERANCE = 5e-4
LEAST_TOLERANCE = 0.02
MOST_ROUNDS = 24
# Labels: share of drafts that name the token one place off, above the share that name the right one.
_SHIFTED = 0.2
_ENOUGH = 40


@dataclass(frozen=True)
class TrainingText:
    """How training makes tokens of messages.

    Attributes:
        template: Jinja source; None: the tokenizer's own.
        options: passed to it.
    """

    template: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnosis:
    """A difference, named.

    Attributes:
        name: what is wrong ("rotary: inverse frequencies rounded to bfloat16").
        kind: position, rotary, norm, mask, tap, labels, embedding, logits, template, or unknown.
        side: which of the two is off.
        anchor, position, slot: of the first difference; -1 where it is not about logits.
        difference: the largest, in units of the spread.
        left: what the named fault leaves of it.
    """

    name: str
    kind: str
    side: Side
    anchor: int = -1
    position: int = -1
    slot: int = -1
    difference: float = 0.0
    left: float = 0.0

    def line(self) -> str:
        """For people."""
        place = f"; first at position {self.position} (anchor {self.anchor}, slot {self.slot})" if self.slot > 0 else ""
        sides = {
            "decoder": "in decoding",
            "training": "in the training-time forward",
            "both": "in what was taught",
            "data": "between serving and the training data",
        }
        return f"{self.name}, {sides[self.side]}{place}"


@dataclass(frozen=True)
class Parity:
    """Result of `check_parity`.

    Attributes:
        answers: compared.
        positions: compared in them.
        largest: difference, in units of the spread.
        tolerance: beyond which it counts.
        fault: None if there is none.
    """

    answers: int
    positions: int
    largest: float
    tolerance: float
    fault: Diagnosis | None

    def lines(self) -> list[str]:
        """For people."""
        lines = [
            f"parity: {self.positions} drafted positions of {self.answers} answers compared; largest difference "
            f"{self.largest:.2g} of the logits' spread (tolerance {self.tolerance:.2g})"
        ]
        lines.append(f"NO: {self.fault.line()}" if self.fault else "what was trained is what decodes")
        return lines

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


def name_fault(
    served: Trace,
    trained: Trace,
    target: Any,
    model: DraftModel,
    tolerance: float,
    *,
    prompt: Prompt | None = None,
    training_text: TrainingText | None = None,
    thetas: tuple[float, ...] = (),
) -> Diagnosis | None:
    """What is wrong between two traces of one text; None if nothing is.

    Args:
        served: what the decoder's drafter said.
        trained: what the training-time forward said.
        target, model: the artefacts both claim to have run.
        tolerance: in units of the spread.
        prompt: the messages behind the served prompt, if known.
        training_text: how training writes messages.
        thetas: further rotary bases to try.
    """
    if prompt is not None:
        fault = _template_fault(served, prompt, target, training_text or TrainingText())
        if fault is not None:
            return fault
    gaps = compare(served, trained)
    wrong = [(key, gap) for key, gap in gaps if gap > tolerance]
    if not wrong:
        return _label_fault(trained)
    (anchor, position), _ = wrong[0]
    largest = max(gap for _, gap in gaps)
    oracle = _Oracle(target, model, served.tokens, _some_rounds(sorted({key[0] for key, _ in wrong}), MOST_ROUNDS))
    side: Side = "training" if oracle.left(trained, NOTHING) > tolerance else "decoder"
    trace = trained if side == "training" else served
    faults = known_faults(model, target.head(), target.geometry.layers, thetas)
    left, number = min((oracle.left(trace, candidate), index) for index, candidate in enumerate(faults))
    best = faults[number]
    known = left <= tolerance
    return Diagnosis(
        name=f"{best.kind}: {best.name}" if known else "unknown: no known fault reproduces it",
        kind=best.kind if known else "unknown",
        side=side,
        anchor=anchor,
        position=position,
        slot=position - anchor,
        difference=largest,
        left=left,
    )


class _Oracle:
    """The third opinion: `whatif` over some rounds of one text."""

    def __init__(self, target: Any, model: DraftModel, tokens: list[int], anchors: list[int]) -> None:
        self._target, self._model, self._tokens, self._anchors = target, model, tokens, anchors
        self._features: dict[tuple[int, bool], Tensor] = {}

    def left(self, trace: Trace, fault: Fault) -> float:
        """Largest difference between `trace` and the drafter with `fault`, in units of the spread."""
        worst, compared = 0.0, 0
        features_SF = self._of_taps(fault.tap_shift, fault.tap_normed)
        for anchor in self._anchors:
            rows = block_logits(self._model, self._target.head(), features_SF, self._tokens, anchor, fault)
            for slot, row in enumerate(rows.float().cpu(), start=1):
                theirs = trace.logits.get((anchor, anchor + slot))
                if theirs is None or bool(row.isnan().any()):
                    continue
                compared += 1
                gap = difference(row, theirs)
                worst = max(worst, float("inf") if gap != gap else gap)
        return worst if compared else float("inf")

    @torch.no_grad()
    def _of_taps(self, shift: int, normed: bool) -> Tensor:
        if (shift, normed) not in self._features:
            row = training_row(self._tokens, 0)
            taps = [tap + shift for tap in self._model.spec.taps]
            features = self._target.features(row.tokens_S, row.document_S, row.positions_S, tuple(taps)).taps_SF
            if normed:
                parts = list(features.chunk(len(taps), dim=-1))
                last = taps.index(self._target.geometry.layers - 1)
                parts[last] = self._target.decoder.norm(parts[last])
                features = torch.cat(parts, dim=-1)
            self._features[shift, normed] = features
        return self._features[shift, normed]


def _some_rounds(anchors: list[int], most: int) -> list[int]:
    """At most so many, evenly chosen, first and last among them."""
    if len(anchors) <= most:
        return anchors
    return [anchors[index * (len(anchors) - 1) // (most - 1)] for index in range(most)]


def _template_fault(served: Trace, prompt: Prompt, target: Any, text: TrainingText) -> Diagnosis | None:
    """Whether training makes the served prompt of the same messages; the answer is cut from the served tokens."""
    tokenizer = target.tokenizer
    if not (has_template(tokenizer) or text.template):
        return None
    answer = served.tokens[served.prompt :]
    stops = set(target.stop_ids)
    words = tokenizer.decode(answer[:-1] if answer and answer[-1] in stops else answer)
    if not words.strip():
        return None
    messages = [*prompt.as_messages(), {"role": "assistant", "content": words}]
    tokeniser = Tokeniser(tokenizer, chat_template=text.template, template_options=text.options, stop_ids=sorted(stops))
    result = tokeniser([Conversation(prompt.source, messages=messages, tools=prompt.tools)])[0]
    if not result.documents:
        why = result.refusal or (result.untaught[0] if result.untaught else None)
        return Diagnosis(
            f"template: training cannot use it ({why.reason if why else 'no document'})", "template", "data"
        )
    document = result.documents[-1]
    untaught = (~document.loss_mask).nonzero()[:, 0]
    # Before the last taught run: what the model was given.
    length = int(untaught[-1]) + 1 if untaught.numel() else 0
    trained = document.tokens[:length].tolist()
    given = served.tokens[: served.prompt]
    if trained == given:
        return None
    place = next(
        (at for at, (a, b) in enumerate(zip(trained, given, strict=False)) if a != b), min(len(trained), len(given))
    )

    def word(tokens: list[int]) -> str:
        return repr(tokenizer.decode(tokens[place : place + 1])) if place < len(tokens) else "nothing"

    name = f"template: token {place} of the prompt is {word(given)} as served, {word(trained)} as trained"
    return Diagnosis(name, "template", "data")


def _label_fault(trace: Trace) -> Diagnosis | None:
    """Whether the drafts name the tokens one place off: then the labels were shifted when it was trained."""
    best = {key: int(row.argmax()) for key, row in trace.logits.items()}
    for shift, words in ((1, "after"), (-1, "before")):
        # Where a token repeats its neighbour, a draft is right at both places and says nothing.
        telling = [
            (draft, trace.tokens[position], trace.tokens[position + shift])
            for (_, position), draft in best.items()
            if 0 <= position + shift < len(trace.tokens) and trace.tokens[position] != trace.tokens[position + shift]
        ]
        if len(telling) < _ENOUGH:
            continue
        right = sum(draft == own for draft, own, _ in telling) / len(telling)
        beside = sum(draft == other for draft, _, other in telling) / len(telling)
        if beside > right + _SHIFTED:
            name = f"labels: drafts name the token one place {words} theirs ({beside:.0%}, the right one {right:.0%})"
            return Diagnosis(name, "labels", "both")
    return None


def tolerance_for(target: Any, model: DraftModel, row: Row, prompt: int, anchors: Sequence[int]) -> float:
    """See the module's docstring."""
    if model.fc.weight.dtype == torch.float32:
        return FLOAT32_TOLERANCE
    narrow = training_trace(target, model, row, prompt, anchors)
    wide_target = _Widened(target)
    wide = training_trace(wide_target, copy.deepcopy(model).float(), row, prompt, anchors)
    return max(LEAST_TOLERANCE, 3 * max((gap for _, gap in compare(narrow, wide)), default=0.0))


class _Widened:
    """A target whose features and head come in float32; its own forward stays as it is."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.device = target.device

    def head(self) -> Any:
        head = self._target.head()
        return replace(head, embedding_VH=head.embedding_VH.float(), head_VH=head.head_VH.float())

    def features(self, *arguments: Any) -> Any:
        features = self._target.features(*arguments)
        return replace(features, taps_SF=features.taps_SF.float())


def check_parity(
    model: DraftModel,
    target: Any,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 64,
    template_options: dict[str, Any] | None = None,
    training_text: TrainingText | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Parity:
    """Decodes every prompt and holds the drafter's logits against the training-time forward.

    Args:
        model: the drafter, on the target's device and in its dtype.
        prompts: what is asked.
        max_new_tokens: of an answer; blocks that the limit shortens are left out.
        template_options: passed to the chat template as serving will.
        training_text: how training wrote messages; none: the tokenizer's template without options.
        progress: called with (answers compared, answers).

    Raises:
        UserError: no prompts, one that leaves no room in the target's positions, or nothing could be compared.
    """
    if not prompts:
        raise UserError("there are no prompts to decode", where="parity")
    proposer = RecordingProposer(model, target.head())
    text = training_text or TrainingText(options=template_options or {})
    positions, largest, tolerance = 0, 0.0, FLOAT32_TOLERANCE
    for index, (prompt, ids) in enumerate(
        zip(prompts, encode_prompts(prompts, target.tokenizer, template_options), strict=True)
    ):
        limit = answer_limit(target, ids, max_new_tokens, prompt.source)
        served = decoding_trace(target, proposer, ids, limit, target.stop_ids)
        row = training_row(served.tokens, served.prompt)
        anchors = served.anchors
        if index == 0:
            tolerance = tolerance_for(target, model, row, served.prompt, anchors)
        trained = training_trace(target, model, row, served.prompt, anchors)
        gaps = compare(served, trained)
        positions += len(gaps)
        largest = max([largest, *(gap for _, gap in gaps)])
        fault = name_fault(served, trained, target, model, tolerance, prompt=prompt, training_text=text)
        if fault is not None:
            return Parity(index + 1, positions, largest, tolerance, fault)
        if progress is not None:
            progress(index + 1, len(prompts))
    if not positions:
        raise UserError(
            "no whole block was drafted, so there is nothing to compare",
            where="parity",
            fix="give longer answers or more prompts",
        )
    return Parity(len(prompts), positions, largest, tolerance, None)


def training_text_of(drafter: Path) -> TrainingText | None:
    """How the run that wrote a checkpoint wrote its messages; None where it is no checkpoint of a run.

    Raises:
        UserError: the run's chat template file is gone.
    """
    run = find_run(drafter)
    if run is None:
        return None
    data = run.config["data"]
    template = None
    if data.get("chat_template"):
        try:
            template = Path(data["chat_template"]).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"the chat template that it was trained with cannot be read: {error.strerror}",
                where=data["chat_template"],
                fix="put the file back, or check a copy of the drafter outside its run folder",
            ) from None
    return TrainingText(template, dict(data.get("template_options") or {}))

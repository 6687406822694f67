"""What `draftsmith data check` and `data preview` do: a run's data, looked at before anything is trained on it.

Both prepare the data exactly as training will (same cache), need the target's configuration and tokenizer, and no
device; only re-scoring loads the target.

`check_data` separates what ends in failure ("no": nothing usable, broken files, ids past the vocabulary, no free mask
token, text that the target would never say) from what costs quality ("note"). Both are said of data that were read; a
path that leads nowhere and a config that cannot be used are errors of who named them, as in every command.
"""

from __future__ import annotations

import hashlib
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftsmith.blocks import Row, make_draft_batch
from draftsmith.config import RunConfig
from draftsmith.data.conversations import read_conversations
from draftsmith.data.corpus import Corpus, NothingUsable, make_tokeniser, prepare_corpus
from draftsmith.data.preview import RowPicture, picture_row
from draftsmith.data.problems import NOT_A_CONTINUATION, UnusableData
from draftsmith.data.report import REFUSED, TRUNCATED, DataReport
from draftsmith.data.survey import Survey, survey
from draftsmith.data.template import Tokeniser
from draftsmith.decode.score import Score, score_rows
from draftsmith.drafter import DrafterSpec, read_spec, resolve_spec
from draftsmith.errors import UserError
from draftsmith.objective import decay_weights
from draftsmith.pipeline.plan import beyond_positions, check_length
from draftsmith.target.forward import Target
from draftsmith.target.geometry import TargetGeometry, read_geometry
from draftsmith.target.load import load_tokenizer, read_stop_ids
from draftsmith.target.taps import check_mask_token, choose_mask_token

# Text of another model in another template gets below a tenth; fluent text by people from an instruct model about half.
NEVER_SAID, HARDLY_SAID = 0.1, 0.5
MOST_REFUSED, MANY_REFUSED = 0.9, 0.1
MANY_DUPLICATES, MANY_TRUNCATED = 0.2, 0.1
SOME_THINKING = (0.02, 0.98)
GUESSES = 2000  # conversations whose language is guessed


@dataclass
class DataCheck:
    """What `check_data` found.

    Attributes:
        report: of the prepared data; None if it could not be prepared.
        survey: of its text.
        template: "file or tokenizer's own: fingerprint", and whether the two are the same.
        feeds: the end of what a server feeds before an answer, behind a bare user turn; None without a template.
        score: the target's view of a sample, if it was asked.
        failures: why a run on this data cannot succeed.
        notes: what costs quality.
    """

    report: DataReport | None = None
    survey: Survey | None = None
    template: str = ""
    template_is_tokenizers: bool | None = None
    feeds: str | None = None
    score: Score | None = None
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For people, the verdict last."""
        lines: list[str] = []
        if self.report is not None:
            lines += self.report.lines()
            for name, part in (("train", self.report.train), ("held out", self.report.held_out)):
                if part is not None:
                    lines.append(f"{name}, tokens of a document: {part.lengths}")
                    lines.append(f"{name}, anchors of a document: {part.anchors_of_document}")
            layouts = ", ".join(f"{name} {number:,}" for name, number in self.report.layouts.items())
            lines.append(f"layouts: {layouts}; answers end in {self.report.stop_token or 'no token of their own'}")
        if self.survey is not None:
            lines += self.survey.lines()
        if self.template:
            lines.append(self.template)
        if self.feeds is not None:
            lines.append(f"before an answer a server feeds {self.feeds!r}")
        if self.score is not None:
            lines.append(self.score.line())
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"NO: {failure}" for failure in self.failures]
        return [*lines, *([] if self.failures else ["yes: a run can learn from this data"])]

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "ok": not self.failures,
            "failures": self.failures,
            "notes": self.notes,
            "report": None if self.report is None else self.report.to_json(),
            "survey": None if self.survey is None else self.survey.to_json(),
            "template": self.template,
            "template_is_tokenizers": self.template_is_tokenizers,
            "feeds": self.feeds,
            "score": None if self.score is None else self.score.to_json(),
        }


def check_data(
    config: RunConfig,
    load: Callable[[], Target] | None = None,
    *,
    sample_tokens: int = 20_000,
    progress: Callable[[str, int], None] = lambda _what, _done: None,
    incidents: Path | None = None,
) -> DataCheck:
    """Looks at everything about a run's data that can be known before training.

    Args:
        config: the run.
        load: loads the target for re-scoring; None: it is not asked.
        sample_tokens: taught tokens that are re-scored.
        progress: told what is counted and how far it is.
        incidents: where every conversation that is not used in full is listed.

    Raises:
        UserError: target, template or a data file is not there or cannot be read, the config cannot be used, or
            `incidents` cannot be written. What is wrong with data that were read is a failure in the result.
    """
    check = DataCheck()
    geometry = read_geometry(config.target)
    tokenizer = load_tokenizer(config.target)
    start = _start(config, geometry)
    block_size = start.block_size if start else config.drafter.block_size
    configured = start.mask_token_id if start else config.drafter.mask_token_id
    if configured is not None:
        check_mask_token(configured, geometry.vocab_rows)
    tokeniser = _describe_template(check, config, tokenizer)
    try:
        corpus = _corpus(config, tokenizer, block_size, lambda done: progress("conversation", done))
    except UnusableData as error:
        check.failures.append(str(error))
        if isinstance(error, NothingUsable) and incidents is not None:
            error.incidents.write(incidents)
        return check
    report = check.report = corpus.report
    if incidents is not None:
        report.incidents.write(incidents)
    every = max(1, report.conversations // GUESSES)
    check.survey = survey(read_conversations((*config.data.train, *config.data.held_out)), every)
    if tokeniser is not None:
        check.notes += _left_out(tokeniser, check.survey)
    if report.max_token_id >= geometry.vocab_rows:
        check.failures.append(
            f"the data holds token {report.max_token_id}, the target has {geometry.vocab_rows} embedding rows: "
            "the tokenizer is not this target's"
        )
    else:
        try:
            used = torch.from_numpy(corpus.used_ids)
            choose_mask_token(tokenizer, geometry.vocab_rows, used, configured)
        except UserError as error:
            check.failures.append(str(error))
    check.notes += beyond_positions(config.rows.length, report, geometry)
    _judge_report(check, config, report, block_size)
    if load is not None and not check.failures:
        rows = map(corpus.train.row, range(corpus.train.rows_per_epoch))
        check.score = score_rows(load(), rows, sample_tokens, lambda done: progress("token", done))
        _judge_score(check)
    return check


def _left_out(tokeniser: Tokeniser, found: Survey) -> list[str]:
    """What conversations bring and the chat template does not write."""
    notes = [
        f"{count:,} answers have a thought in {key!r}, which the chat template does not write: it is not taught"
        for key, count in found.thought_fields.items()
        if not tokeniser.writes_thought(key)
    ]
    if found.with_tools and not tokeniser.writes_tools():
        notes.append(
            f"{found.with_tools:,} conversations bring tools, which the chat template does not write: their answers "
            "are taught as if there were none"
        )
    return notes


def _judge_report(check: DataCheck, config: RunConfig, report: DataReport, block_size: int) -> None:
    counts: dict[str, int] = {}
    for (effect, _), number in report.counts.items():
        counts[effect] = counts.get(effect, 0) + number
    refused = counts.get(REFUSED, 0) / report.conversations
    if refused > MOST_REFUSED:
        check.failures.append(f"{refused:.1%} of the conversations are refused; the reasons stand above")
    elif refused > MANY_REFUSED:
        check.notes.append(f"{refused:.1%} of the conversations are refused; the reasons stand above")
    if any(reason == NOT_A_CONTINUATION for _, reason in report.counts):
        check.notes.append(
            "some answers do not continue what a server feeds before them: is thinking on in the template and off in "
            "the data, or the other way round? (data.template_options)"
        )
    if report.stop_token is None and report.plain_text < report.used:
        check.notes.append(
            "the template ends answers with no token, so no end is taught; if generation stops at what opens the next "
            "turn, the target's generation_config.json must name that token (eos_token_id)"
        )
    if report.duplicates > MANY_DUPLICATES * report.used:
        check.notes.append(f"{report.duplicates / report.used:.1%} of the conversations repeat an earlier one")
    if counts.get(TRUNCATED, 0) > MANY_TRUNCATED * report.used:
        check.notes.append(f"{counts[TRUNCATED] / report.used:.1%} are cut off: raise rows.length if memory allows")
    train = report.train
    per_row = train.anchors / train.rows
    if per_row < config.rows.anchors / 2:
        check.notes.append(
            f"a row has {per_row:.0f} anchors on average and rows.anchors is {config.rows.anchors}: most drafts are "
            f"padding; {max(1, round(per_row))} would do"
        )
    if train.slots_per_anchor < (block_size - 1) / 2:
        check.notes.append(
            f"answers are short for blocks of {block_size}: {train.slots_per_anchor:.1f} of {block_size - 1} slots are "
            "taught; a smaller drafter.block_size costs less"
        )
    if train.rows < config.training.rows_per_update:
        check.notes.append(
            f"an epoch has {train.rows} rows and an update takes {config.training.rows_per_update}: the same text is "
            "learnt several times in one update (lower rows.length or training.rows_per_update)"
        )
    survey_ = check.survey
    if survey_ is not None and survey_.answers:
        share = survey_.thinking / survey_.answers
        if SOME_THINKING[0] < share < SOME_THINKING[1]:
            check.notes.append(f"{share:.1%} of the answers think and the others do not: which of them will be served?")


def _judge_score(check: DataCheck) -> None:
    if check.score is None:
        return
    if check.score.greedy_share < NEVER_SAID:
        check.failures.append(
            f"only {check.score.greedy_share:.1%} of the taught tokens are the target's first choice: this is not text "
            "of this target in this template (draftsmith data regenerate lets it answer)"
        )
    elif check.score.greedy_share < HARDLY_SAID:
        check.notes.append("the target would say most of this otherwise: draftsmith data regenerate lets it answer")


def _describe_template(check: DataCheck, config: RunConfig, tokenizer: Any) -> Tokeniser | None:
    """What writes the conversations; None without a chat template."""
    tokeniser = make_tokeniser(config.data, tokenizer, read_stop_ids(config.target, tokenizer))
    own = getattr(tokenizer, "chat_template", None)
    used = tokeniser.template or own
    if not used:
        check.template = "no chat template: only plain text can be learnt"
        return None
    check.template_is_tokenizers = own is not None and fingerprint_text(used) == fingerprint_text(own)
    name = config.data.chat_template or "the tokenizer's own"
    check.template = f"chat template: {name}, fingerprint {fingerprint_text(used)}"
    if not check.template_is_tokenizers:
        own_print = "none" if own is None else fingerprint_text(own)
        check.template += f"; the tokenizer's own: {own_print}"
        check.notes.append("the chat template is not the tokenizer's: the server must be given this file too")
    check.feeds = tokeniser.generation_prompt()
    return tokeniser


def fingerprint_text(text: Any) -> str:
    """Short hash of a template; of all of them where a tokenizer has several."""
    return hashlib.sha256(str(text).encode()).hexdigest()[:12]


def _start(config: RunConfig, geometry: TargetGeometry) -> DrafterSpec | None:
    """Spec of the drafter to start from, if there is one: its block size and mask token are not the config's."""
    return read_spec(Path(config.drafter.init), geometry.layers) if config.drafter.init else None


def _corpus(
    config: RunConfig, tokenizer: Any, block_size: int, progress: Callable[[int], None] | None = None
) -> Corpus:
    """What a run of this config would train on."""
    check_length(config.rows.length, read_geometry(config.target))
    return prepare_corpus(
        config.data,
        tokenizer,
        length=config.rows.length,
        seed=config.training.seed,
        block_size=block_size,
        stop_ids=read_stop_ids(config.target, tokenizer),
        progress=progress,
    )


def preview_rows(
    config: RunConfig, numbers: list[int], *, conversation: str | None = None, block: int | None = None
) -> tuple[list[RowPicture], Corpus]:
    """Rows of a run as training will see them.

    Args:
        config: the run.
        numbers: rows of the training stream; ignored where a conversation is named.
        conversation: "file:number", as reports name it: the row that holds it.
        block: which block of the row is shown.

    Raises:
        UserError: anything wrong with target or data, or no row holds the conversation.
    """
    geometry = read_geometry(config.target)
    tokenizer = load_tokenizer(config.target)
    spec = _start(config, geometry)
    block_size = spec.block_size if spec else config.drafter.block_size
    corpus = _corpus(config, tokenizer, block_size)
    if conversation is not None:
        found = corpus.train.find(conversation)
        if found is None:
            fix = "name it as data check does; it may be held out or refused"
            raise UserError("is in no training row", where=conversation, fix=fix)
        numbers = [found]
    if spec is None:
        used = torch.from_numpy(corpus.used_ids)
        mask = choose_mask_token(tokenizer, geometry.vocab_rows, used, config.drafter.mask_token_id)
        spec = resolve_spec(config.drafter, geometry, mask.id)
    kinds, mask_token_id = spec.kinds, spec.mask_token_id
    decays = config.objective.weights == "decay"
    weights = decay_weights(block_size, config.objective.gamma) if decays else torch.ones(block_size)

    def picture(number: int) -> RowPicture:
        row: Row = corpus.train.row(number)
        batch = make_draft_batch(
            row,
            anchors=config.rows.anchors,
            block_size=block_size,
            mask_token_id=mask_token_id,
            slot_weights_B=weights,
            chunk=config.head_chunk(block_size),
            kinds=kinds,
            seed=(config.training.seed, number),
            with_tiles=False,
            per_document=config.anchors.limits(),
        )
        return picture_row(
            row, corpus.train.row_documents(corpus.train.packed_row(number)), batch, tokenizer, block=block
        )

    return [picture(number) for number in numbers], corpus


@dataclass(frozen=True)
class Prepared:
    """What `prepare_data` did.

    Attributes:
        report: of the data.
        tokens: of all documents, held-out ones included.
        seconds: from the first byte read to packed rows.
        peak_bytes: largest resident memory of this process so far, mapped files included.
    """

    report: DataReport
    tokens: int
    seconds: float
    peak_bytes: int

    def lines(self) -> list[str]:
        """For people."""
        return [
            *self.report.lines(),
            f"{self.tokens:,} tokens in {self.seconds:.1f} s ({self.tokens / self.seconds:,.0f} tokens/s); at most "
            f"{self.peak_bytes / 2**30:.2f} GiB of memory",
        ]

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "report": self.report.to_json(),
            "tokens": self.tokens,
            "seconds": self.seconds,
            "peak_bytes": self.peak_bytes,
        }


def prepare_data(
    config: RunConfig, progress: Callable[[int], None] | None = None, incidents: Path | None = None
) -> Prepared:
    """Reads, tokenises and packs a run's data as training will, which then finds the tokens in the cache.

    Args:
        config: the run.
        progress: told how many conversations were read.
        incidents: where every conversation that is not used in full is listed.

    Raises:
        UserError: the target's tokenizer cannot be read, or anything is wrong with the data.
    """
    tokenizer = load_tokenizer(config.target)
    geometry = read_geometry(config.target)
    start = _start(config, geometry)
    began = time.monotonic()
    try:
        block_size = start.block_size if start else config.drafter.block_size
        corpus = _corpus(config, tokenizer, block_size, progress)
    except NothingUsable as error:
        if incidents is not None:
            error.incidents.write(incidents)
        raise
    seconds = time.monotonic() - began
    if incidents is not None:
        corpus.report.incidents.write(incidents)
    held_out = corpus.held_out.real_tokens_per_epoch if corpus.held_out else 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Prepared(corpus.report, corpus.train.real_tokens_per_epoch + held_out, seconds, peak)

"""vLLM's unfinished requests, as the scheduler side sees them."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from kvtier_core.config.model import RequestsConfig
from kvtier_core.engine.request_view import Bypass, RequestView
from kvtier_core.engine.step import ScheduledRequest
from kvtier_core.outside import Printable, printable, stand_in
from kvtier_vllm.requests.disaggregation import computed_elsewhere, is_continued_elsewhere
from kvtier_vllm.requests.fields import Unidentified
from kvtier_vllm.requests.hints import UnreadWords, hints_of
from kvtier_vllm.requests.identity import Identifier, RequestIdentity
from kvtier_vllm.requests.items import content
from kvtier_vllm.requests.names import CachedNames
from kvtier_vllm.requests.words import Words

_ENDED_WELL = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@attrs.define
class _Tracked:
    request: Request
    identity: RequestIdentity | Bypass
    hints: Mapping[str, str]
    traceparent: Printable
    words: Words
    continued_elsewhere: bool = False
    computed_elsewhere: int = 0
    computed: int = 0  #: tokens that vLLM had when it last asked for a match


class RequestTracker:
    """Identifies each request once, and checks what vLLM's own caches supply to it. For the scheduler's thread."""

    def __init__(
        self,
        identifier: Identifier | None = None,
        names: CachedNames | None = None,
        *,
        reads_handovers: bool = False,
        defaults: RequestsConfig | None = None,
    ) -> None:
        """``reads_handovers``: a request may state that another engine has computed its prompt, or continues it.

        ``defaults`` are for requests that do not say how much of them is stored and loaded.
        """
        self._defaults = defaults or RequestsConfig()
        self._reads_handovers = reads_handovers
        self._identifier = identifier or Identifier()
        self._names = names or CachedNames()
        self._unread = UnreadWords()
        self._tracked: dict[str, _Tracked] = {}

    def __len__(self) -> int:
        return len(self._tracked)

    def request(self, request_id: str) -> Request:
        """The request of this id, which has had a view and has not finished."""
        return self._tracked[request_id].request

    def view(self, request: Request) -> RequestView:
        """The request as it is now. The first call must come before the engine has computed any of it."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            traceparent = printable((request.trace_headers or {}).get("traceparent", ""))
            said = request.kv_transfer_params
            identity = self._identifier.identify(request)
            words = Words.of(said, self._defaults.of(self._identifier.salt(request)))
            tracked = _Tracked(request, identity, hints_of(request), traceparent, words)
            if self._reads_handovers:
                tracked.continued_elsewhere = is_continued_elsewhere(said)
                tracked.computed_elsewhere = computed_elsewhere(said, request.num_prompt_tokens)
            self._unread.look(said, tracked.hints)
            self._tracked[request.request_id] = tracked
            if adapter := request.lora_request:
                self._names.note_adapter(stand_in(adapter.lora_name), self._identifier.adapter(adapter))
        return _view(request, tracked)

    def check_cached(self, request_id: str, computed: int) -> Bypass | None:
        """Why vLLM's own KV of the first ``computed`` tokens may not be this request's; None if it is."""
        tracked = self._tracked[request_id]
        tracked.computed = computed
        if isinstance(tracked.identity, Bypass):
            return None
        bypass = self._names.check_cached(tracked.identity, computed)
        tracked.identity = bypass or tracked.identity
        return bypass

    def note_load(self, request_id: str, tokens: int) -> None:
        """Note that the KV of ``tokens`` after those of the last `check_cached` is loaded, and vLLM may cache it."""
        tracked = self._tracked[request_id]
        if isinstance(tracked.identity, RequestIdentity):
            self._names.note_load(tracked.identity, tracked.computed + tokens)

    def follow(self, output: SchedulerOutput) -> dict[str, Bypass]:
        """Note what vLLM's encoder frees and then computes in a step.

        Returns the requests for which this step may compute KV that is not their own, and why.
        """
        for name in output.free_encoder_mm_hashes:
            self._names.drop_encoding(stand_in(name))
        for request_id, numbers in output.scheduled_encoder_inputs.items():
            tracked = self._tracked[request_id]
            for number in numbers:
                name = stand_in(tracked.request.mm_features[number].identifier)
                self._names.note_encoding(name, _source(tracked, number))
        bypassed = {}
        for each in self.scheduled(output):
            tracked = self._tracked[each.request_id]
            if isinstance(tracked.identity, Bypass):
                continue
            if bypass := self._names.check_encoded(tracked.identity, each.computed, each.end):
                tracked.identity = bypassed[each.request_id] = bypass
        return bypassed

    def scheduled(self, output: SchedulerOutput) -> list[ScheduledRequest]:
        """The requests of a step, in the order in which they were scheduled."""
        return [
            ScheduledRequest(request_id, tracked.request.num_computed_tokens, tokens)
            for request_id, tokens in output.num_scheduled_tokens.items()
            if (tracked := self._tracked.get(request_id))
        ]

    def finish(self, request: Request) -> RequestView | None:
        """Forget a request. Returns its last view; None if it never had one."""
        tracked = self._tracked.pop(request.request_id, None)
        return _view(request, tracked) if tracked else None


def _view(request: Request, tracked: _Tracked) -> RequestView:
    identity = tracked.identity
    return RequestView(
        request_id=request.request_id,
        token_ids=request.all_token_ids,
        prompt_tokens=request.num_prompt_tokens,
        identity=identity if isinstance(identity, Bypass) else identity.kv,
        hints=tracked.hints,
        most_loaded=0 if request.skip_reading_prefix_cache else tracked.words.most_loaded,
        media=tracked.words.media,
        most_stored=tracked.words.most_stored,
        memory_only=tracked.words.memory_only,
        computed_tokens=request.num_computed_tokens,
        continued_elsewhere=tracked.continued_elsewhere
        and (request.status in _ENDED_WELL or not request.is_finished()),
        computed_elsewhere=tracked.computed_elsewhere,
        preemptions=request.num_preemptions,
        traceparent=tracked.traceparent,
    )


def _source(tracked: _Tracked, number: int) -> str | None:
    """The input of the encoder for an item. Also for items of a request that is bypassed."""
    if isinstance(tracked.identity, RequestIdentity):
        return tracked.identity.items[number].source
    feature = tracked.request.mm_features[number]
    try:
        return content(feature) if feature.identifier == feature.mm_hash else None
    except Unidentified:
        return None

"""One call that sends a message to a node. It continues after the wait for its response has ended."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from helper.chain.node import Node
from helper.chain.node_http import RequestProgress
from helper.chain.reveal_transaction import RevealMessage
from helper.chain.verdicts import BroadcastOutcome, classify_response
from helper.clock import Clock


class SendCall:
    """A send to one node. It starts immediately.

    Attributes:
        node: the node.
    """

    def __init__(self, node: Node, message: RevealMessage, clock: Clock) -> None:
        self.node = node
        self._clock = clock
        self._progress = RequestProgress(clock.monotonic)
        self._task = asyncio.create_task(node.client.broadcast(message, self._progress))

    @property
    def written_at(self) -> float | None:
        """Monotonic time at which the whole request was written; None before."""
        return self._progress.written_at

    async def wait(self) -> BroadcastOutcome | None:
        """Wait for the response, at most `node.client.response_wait` seconds. Cancels the call if this is cancelled.

        A call of which no byte has left by then, for example because the connection is not established, is cancelled:
        nothing was sent.

        Returns:
            The outcome; None if the whole request was written and the node has not responded. The call continues then.
        """
        seconds = self.node.client.response_wait
        timer = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait({self._task, timer}, return_when=asyncio.FIRST_COMPLETED)
            if not self._task.done() and not self._progress.has_started:
                await self.cancel()
                if self._task.cancelled():  # the first byte may have left just before that
                    outcome = classify_response(None, None, self._progress.has_started)
                    return replace(outcome, log=f"no connection within {seconds:.3g} s")
            if not self._task.done() and self.written_at is not None:
                return None
            return await self._task
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        finally:
            timer.cancel()

    async def finish(self) -> BroadcastOutcome:
        """Wait for the outcome of the call."""
        return await self._task

    async def cancel(self) -> None:
        """Cancel the call and wait for its end."""
        self._task.cancel()
        await asyncio.wait({self._task})

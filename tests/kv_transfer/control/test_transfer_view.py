"""`TransferLog` and what a view keeps to itself."""

from __future__ import annotations

import time

import pytest

from pdserve.kv_transfer.control.transfer_view import NUM_ENDED, TransferLog, without_addresses
from tests.support.transfers.transfer_fakes import make_view


def test_the_last_ended_ones_are_kept_and_their_age_told() -> None:
    clock = [0.0]
    log = TransferLog(lambda: clock[0])
    for number in range(NUM_ENDED + 7):
        clock[0] = float(number)
        log.add(make_view(request_id=f"r{number}", state="LANDED"))
    clock[0] += 2.5
    page = log.page([])
    assert len(page.ended) == NUM_ENDED
    assert [(view.request_id, view.ended_s_ago) for view in page.ended[:2]] == [
        (f"r{NUM_ENDED + 6}", 2.5),
        (f"r{NUM_ENDED + 5}", 3.5),
    ]
    assert log.num_ended["receiver", "landed"] == NUM_ENDED + 7
    assert sum(log.num_ended.values()) == NUM_ENDED + 7


def test_the_oldest_under_way_come_first_and_their_blocks_are_added_up() -> None:
    views = [
        make_view(request_id="young", age_s=0.1, num_blocks_quarantined=3),
        make_view(request_id="old", age_s=9.0, role="source", num_blocks_pinned=5),
        make_view(request_id="middle", age_s=1.0, num_blocks_quarantined=4),
    ]
    page = TransferLog().page(views)
    assert [view.request_id for view in page.under_way] == ["old", "middle", "young"]
    assert (page.num_blocks_pinned, page.num_blocks_quarantined) == (5, 7)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("no connection to 10.0.0.1:7101: refused", "no connection to <address>: refused"),
        ("Connect call failed ('192.168.1.9', 7101)", "Connect call failed ('<address>', 7101)"),
        ("reading block 3 and on from [fe80::1]:7101: reset", "reading block 3 and on from <address>: reset"),
        ("[fe80::1] and 10.0.0.1 are gone", "<address> and <address> are gone"),
        ("ipv4:127.0.0.1:4 and ipv6:%5B::1%5D:4", "<address> and <address>"),
        ("ipv6:%5Bfe80::1%25eth0%5D:4 is gone", "<address> is gone"),
        ("asking prefill-1.cluster.local:7101 for block 5", "asking <address> for block 5"),
        ("reading blocks 0 to 7: nothing for 0.3 s", "reading blocks 0 to 7: nothing for 0.3 s"),
        (
            "the transfer is for another receiver, not for decode-1:00000000000000b7",
            "the transfer is for another receiver, not for decode-1:00000000000000b7",
        ),
        ("failed: 3 of 4", "failed: 3 of 4"),
    ],
)
def test_no_address_is_told(text: str, told: str) -> None:
    assert without_addresses(text) == told


@pytest.mark.parametrize("piece", ["a", "%5B", "1.", "[", "ipv4:", "%5B1%25"])
def test_a_long_text_takes_no_longer_than_its_length(piece: str) -> None:
    text = piece * (400_000 // len(piece))
    began = time.process_time()
    without_addresses(text)
    assert time.process_time() - began < 5, "it took minutes, and the event loop with it"

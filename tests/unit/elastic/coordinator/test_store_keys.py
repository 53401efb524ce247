from __future__ import annotations

from torch._C._distributed_c10d import PrefixStore, TCPStore

from elastic.coordinator.store_keys import Past, sweep_store


def test_only_what_has_passed_goes() -> None:
    """A replica may stand for the whole run while others come and go."""
    keys = [
        "cross/3/0/first/0/0",
        "cross/4/0/first/0/0",
        "cross/12/1/here/all",
        "heal/3/0/1/here/all",
        "heal/4/0/1/here/all",
        "links/3/0/0",
        "links/4/0/0",
        "replica/1/0//cpu//0/0",
        "replica/2/0//cpu//0/0",
        "replica/3/0//cpu//0/0",
        "replica/4/0//cpu//0/0",
        "another/1/x",
        "cross",
        "cross/x/1",
    ]
    past = Past(generation=4, begun=3, present={1, 3})
    stale = [key for key in keys if key in past]
    assert stale == [
        "cross/3/0/first/0/0",
        "heal/3/0/1/here/all",
        "links/3/0/0",
        "replica/2/0//cpu//0/0",
    ]


def test_a_real_store_is_swept() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    worker = TCPStore("127.0.0.1", store.port, is_master=False)
    for prefix in ("cross/1/0", "cross/2/0", "replica/1"):
        PrefixStore(prefix, worker).set("here", "")
    assert sweep_store(store, Past(generation=2, begun=1, present=set())) == 2
    assert sorted(store.list_keys()) == ["cross/2/0/here"]

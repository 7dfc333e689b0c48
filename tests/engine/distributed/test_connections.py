"""When the connections of lost ranks are cut, which ones stay."""

import socket

import torch.distributed as dist

from polyphase.engine.distributed.connections import cut_connections, keep_connections_to, noting_connections


def test_a_thread_may_connect_to_the_store_while_a_group_connects():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    keep_connections_to(store.port)
    with socket.create_server(("127.0.0.1", 0)) as peer:
        with noting_connections():
            of_group, of_thread = socket.create_connection(peer.getsockname()), store.clone()
        with of_group, peer.accept()[0]:
            cut_connections()
            assert of_group.recv(1) == b"", "cut"
            of_thread.set("key", "value")
            assert store.get("key") == b"value"

"""What a peer or worker could do by misbehaving, found by reviewing the core as an adversary would.

Each is a way to take the daemon down, to make it grow, or to be told of wrong bytes as right ones.
"""

from __future__ import annotations

from moriiod.core import events as ev
from moriiod.core import messages as msg
from moriiod.core import requests as req
from moriiod.core.lease import MAX_CLAIMS_OF_A_PEER
from moriiod.core.settings import CoreSettings
from tests.support.sim import Worker, World, make_groups, pack


def linked_world(prefill: int = 1, decode: int = 1, settings: CoreSettings | None = None) -> World:
    world = World(prefill, decode, settings=settings or CoreSettings())
    for worker in world.p_workers:
        worker.publish("first", (0, 1))
    for worker in world.d_workers:
        worker.pull("first", world.p_address, (0, 1), (0, 1))
    world.run()
    return world


def test_S3_generation_that_was_released_takes_no_other_memory() -> None:
    """The consumer's session with the old memory is still open: it would read that."""
    world = linked_world()
    worker, daemon = world.p_workers[0], world.prefill[0]
    worker.ask(req.UnregisterCaches())
    world.run()
    daemon.step(ev.RegionOffered(worker.generation, 0, worker.memory.nbytes))
    reply = worker.ask(req.RegisterCaches(make_groups(), (worker.memory.nbytes,)))
    assert isinstance(reply, req.Refused)
    assert reply.code == "NOT_REGISTERED"


def test_M6_worker_that_dies_between_attach_and_register_leaves_nothing() -> None:
    world = World(1, 1)
    daemon = world.decode[0]
    worker = Worker(world, daemon)
    daemon.workers[worker.generation] = worker
    orphan = req.Orphan("t", world.p_address, world.new_id())
    daemon.step(ev.WorkerConnected(worker.generation, 7, 0))
    worker.send(req.Attach(worker.generation, "w", None, (orphan,)))
    daemon.step(ev.WorkerDied(worker.generation))
    assert daemon.machine.clients.get(worker.generation) is None
    assert len(daemon.machine.orphans) == 0


def test_S6_grants_for_nothing_leave_no_message_to_deliver() -> None:
    world = linked_world(settings=CoreSettings(max_early=8))
    producer, consumer = world.prefill[0], world.decode[0]
    (peer,) = producer.machine.peers
    for number in range(100):
        grant = msg.Grant(f"t{number}", world.new_id(), world.new_id(), True, (pack(1),), ())
        producer.step(ev.PeerMessageReceived(peer.route, consumer.epoch, grant, producer.epoch))
    assert producer.machine.pushes.early_grants == 8
    assert producer.machine.peers.outbox.count() == 0


def test_S6_one_consumer_has_so_many_attempts_at_a_lease() -> None:
    world = linked_world()
    producer, consumer = world.prefill[0], world.decode[0]
    world.p_workers[0].publish("t", (1, 2))
    (peer,) = producer.machine.peers
    for _ in range(100):
        claim = msg.Claim("t", world.new_id(), True, (pack(1),))
        producer.step(ev.PeerMessageReceived(peer.route, consumer.epoch, claim, producer.epoch))
    (lease,) = producer.machine.leases
    assert len(lease.claims) == len(peer.users) == MAX_CLAIMS_OF_A_PEER


def test_S6_early_block_ids_are_bounded_in_bytes() -> None:
    world = linked_world()
    producer, consumer = world.prefill[0], world.decode[0]
    (peer,) = producer.machine.peers
    blocks = (bytes(4 << 20),)
    for number in range(40):
        claim = msg.Claim(f"t{number}", world.new_id(), True, blocks)
        producer.step(ev.PeerMessageReceived(peer.route, consumer.epoch, claim, producer.epoch))
    assert producer.machine.leases.early_claims == 16
    assert "early_buffer_full" in producer.problems


def test_S7_rank_cannot_end_the_epoch_of_another_one_that_is_alive() -> None:
    world = linked_world(1, 2)
    producer, (victim, liar) = world.prefill[0], world.decode
    routes = {peer.epoch: peer.route for peer in producer.machine.peers}
    request = msg.FenceRequest(world.new_id(), victim.epoch)
    producer.step(ev.PeerMessageReceived(routes[liar.epoch], liar.epoch, request, producer.epoch))
    assert not producer.machine.peers.is_void(victim.epoch)
    assert "fence_not_of_sender" in producer.problems


def test_two_workers_that_wait_for_one_layout_do_not_lose_each_others_question() -> None:
    world = World(1, 1)
    daemon = world.decode[0]
    other = Worker(world, daemon)
    world.d_workers.append(other)
    world._employ(daemon, other)
    world.run()
    world.p_workers[0].publish("t1", (1,))
    world.p_workers[0].publish("t2", (2,))
    world.d_workers[0].pull("t1", world.p_address, (1,), (1,))
    other.pull("t2", world.p_address, (2,), (2,))
    for _ in range(200):
        if world.local_step():
            continue
        if not world.net:
            break
        if isinstance(world.net[0].body, msg.LayoutRequest):
            world.lose()
        else:
            world.deliver()
    world.kill_worker(world.d_workers[0])
    world.settle(10)
    assert world.outcomes([other]) == [[("pull", "received", "acked")]]


def test_operations_that_were_cancelled_do_not_wait_for_room() -> None:
    world = World(1, 1, settings=CoreSettings(max_ops_in_flight=1))
    producer, consumer = world.p_workers[0], world.d_workers[0]
    producer.publish("a", (1,))
    consumer.pull("a", world.p_address, (1,), (1,))
    world.run(copies=False)
    for number in range(20):
        producer.publish(f"b{number}", (2,))
        consumer.pull(f"b{number}", world.p_address, (2,), (2,))
        world.run(copies=False)
        consumer.ask(req.Abort(f"b{number}", "pull"))
        world.run(copies=False)
    assert len(world.decode[0].machine.ops) == 1
    world.settle(5)
    world.assert_empty()

//! Which clients a server has at a time, and which of them gives way when there is no room for another one.
//!
//! The places are shared equally among peers: the addresses that TCP clients connect from, and the processes that connect
//! over a unix socket. A client of a peer that has less than its share always gets in, in the place of the client of the
//! largest peer that has been idle for longest. A client of any other peer gets in where a client of its own peer, or of
//! everybody if all peers are equal, is idle. So neither silent clients nor those of one peer keep the others out.

use std::cell::{Cell, OnceCell, RefCell};
use std::net::{IpAddr, Ipv6Addr};
use std::rc::Rc;
use std::time::Duration;

use larder_block::event_loop::{LoopTime, Socket};

use super::limits::Limits;

/// A client that has made no request for so long gives way, one that never made any, and one that did.
const SILENT_FOR: Duration = Duration::from_secs(10);
const IDLE_FOR: Duration = Duration::from_secs(60);

/// Bits of an IPv6 address that one host has for itself: all addresses with the same first ones are one peer.
const IPV6_HOST_BITS: u32 = 64;

/// Where a client connects from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Peer {
    Address(IpAddr),
    Process(i32),
    /// The kernel does not say.
    Unknown,
}

impl Peer {
    /// The peer at the other end of a socket.
    pub(super) fn of(socket: &Socket) -> Self {
        match (socket.peer_address(), socket.peer_pid()) {
            (Some(address), _) => Self::of_address(address),
            (None, Some(pid)) => Self::Process(pid),
            (None, None) => Self::Unknown,
        }
    }

    /// The peer that has an IP address.
    fn of_address(address: IpAddr) -> Self {
        Self::Address(match address.to_canonical() {
            IpAddr::V6(address) => {
                let network = u128::from(address) >> IPV6_HOST_BITS << IPV6_HOST_BITS;
                IpAddr::V6(Ipv6Addr::from(network))
            }
            address => address,
        })
    }
}

/// A client that is connected, or about to be told that it is not.
pub(super) struct Member {
    peer: Peer,
    /// When it connected, or made its last request.
    active_at: Cell<LoopTime>,
    has_requested: Cell<bool>,
    evicted: Cell<bool>,
    /// What it has under way, once its handshake is over.
    limits: OnceCell<Rc<Limits>>,
}

impl Member {
    /// Its requests are counted by `limits`, which is said once.
    pub(super) fn counted_by(&self, limits: &Rc<Limits>) {
        let _ = self.limits.set(Rc::clone(limits));
    }

    /// Counts a request that was received at `now`.
    pub(super) fn requests(&self, now: LoopTime) {
        self.active_at.set(now);
        self.has_requested.set(true);
    }

    /// It has to give way to another client.
    pub(super) fn is_evicted(&self) -> bool {
        self.evicted.get()
    }

    fn is_idle(&self, now: LoopTime) -> bool {
        let limit = if self.has_requested.get() { IDLE_FOR } else { SILENT_FOR };
        now.since(self.active_at.get()) >= limit && self.limits.get().is_none_or(|limits| !limits.is_working())
    }
}

/// The clients of a server.
pub(super) struct Admission {
    clients_max: usize,
    members: RefCell<Vec<Rc<Member>>>,
}

/// What becomes of a client that connects.
pub(super) enum Admitted {
    /// There was room.
    Free(Rc<Member>),
    /// Another client, which is told by [`Member::is_evicted`], gives way to it.
    InPlaceOf(Rc<Member>),
    /// There is no room.
    Refused,
}

impl Admission {
    pub(super) fn new(clients_max: usize) -> Self {
        Self {
            clients_max,
            members: RefCell::default(),
        }
    }

    /// Admits a client of `peer` that connects at `now`, or refuses it.
    pub(super) fn admit(&self, peer: Peer, now: LoopTime) -> Admitted {
        let member = Rc::new(Member {
            peer,
            active_at: Cell::new(now),
            has_requested: Cell::new(false),
            evicted: Cell::new(false),
            limits: OnceCell::new(),
        });
        let mut members = self.members.borrow_mut();
        if members.len() < self.clients_max {
            members.push(Rc::clone(&member));
            return Admitted::Free(member);
        }
        let Some(victim) = victim(&members, self.clients_max, peer, now) else {
            return Admitted::Refused;
        };
        members[victim].evicted.set(true);
        members[victim] = Rc::clone(&member);
        Admitted::InPlaceOf(member)
    }

    /// Frees the place of a client that has disconnected.
    pub(super) fn leave(&self, member: &Rc<Member>) {
        self.members.borrow_mut().retain(|other| !Rc::ptr_eq(other, member));
    }

    pub(super) fn len(&self) -> usize {
        self.members.borrow().len()
    }
}

/// Returns the index of the client that gives way to one of `peer`.
fn victim(members: &[Rc<Member>], clients_max: usize, peer: Peer, now: LoopTime) -> Option<usize> {
    let mut peers: Vec<(Peer, usize)> = Vec::new();
    for member in members {
        match peers.iter_mut().find(|(known, _)| *known == member.peer) {
            Some((_, count)) => *count += 1,
            None => peers.push((member.peer, 1)),
        }
    }
    let own = peers
        .iter()
        .find(|(known, _)| *known == peer)
        .map_or(0, |(_, count)| *count);
    let peer_count = peers.len() + usize::from(own == 0);
    let share = (clients_max / peer_count).max(1);
    let (largest, largest_count) = peers.into_iter().max_by_key(|(_, count)| *count)?;
    let may_give_way = |member: &Member| match (own < share, largest_count > share) {
        (true, true) => member.peer == largest,
        (true, false) => member.is_idle(now),
        (false, _) => member.peer == peer && member.is_idle(now),
    };
    let candidates = members.iter().enumerate().filter(|(_, member)| may_give_way(member));
    let longest_idle = candidates.min_by_key(|(_, member)| member.active_at.get());
    longest_idle.map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> LoopTime {
        LoopTime::default().after(Duration::from_secs(seconds))
    }

    fn peer(last: u8) -> Peer {
        Peer::of_address(IpAddr::from([192, 0, 2, last]))
    }

    fn is_in(admitted: &Admitted) -> bool {
        !matches!(admitted, Admitted::Refused)
    }

    fn member(admitted: Admitted) -> Rc<Member> {
        match admitted {
            Admitted::Free(member) | Admitted::InPlaceOf(member) => member,
            Admitted::Refused => panic!("refused"),
        }
    }

    #[test]
    fn silent_clients_give_way_to_later_ones() {
        let admission = Admission::new(4);
        let silent: Vec<_> = (0..4)
            .map(|second| member(admission.admit(peer(1), at(second))))
            .collect();
        assert!(
            !is_in(&admission.admit(peer(1), at(9))),
            "none is silent for long enough"
        );
        let next = member(admission.admit(peer(1), at(10)));
        assert_eq!(
            silent.iter().map(|one| one.is_evicted()).collect::<Vec<_>>(),
            [true, false, false, false]
        );
        next.requests(at(10));
        silent[1..].iter().for_each(|one| one.requests(at(11)));
        assert!(!is_in(&admission.admit(peer(1), at(69))), "they have worked");
        assert!(is_in(&admission.admit(peer(1), at(70))));
        assert!(next.is_evicted());
        assert_eq!(admission.len(), 4);
    }

    #[test]
    fn peer_with_less_than_its_share_gets_in() {
        let admission = Admission::new(4);
        let greedy: Vec<_> = (0..4).map(|_| member(admission.admit(peer(1), at(0)))).collect();
        greedy
            .iter()
            .enumerate()
            .for_each(|(index, one)| one.requests(at(10 - index as u64)));
        let other = member(admission.admit(peer(2), at(10)));
        assert!(greedy[3].is_evicted(), "the longest idle one");
        assert!(is_in(&admission.admit(peer(2), at(10))));
        assert!(!is_in(&admission.admit(peer(2), at(10))), "it has its share");
        assert!(!is_in(&admission.admit(peer(1), at(10))), "and so has the other one");
        assert!(!other.is_evicted());
        assert_eq!(greedy.iter().filter(|one| one.is_evicted()).count(), 2);
    }

    #[test]
    fn more_peers_than_places_share_them_by_idleness() {
        let admission = Admission::new(2);
        let first = member(admission.admit(peer(1), at(0)));
        first.requests(at(0));
        let _second = member(admission.admit(peer(2), at(0)));
        assert!(!is_in(&admission.admit(peer(3), at(5))));
        assert!(is_in(&admission.admit(peer(3), at(11))), "one was silent");
        assert!(!first.is_evicted());
    }

    #[test]
    fn place_is_free_after_its_client_left() {
        let admission = Admission::new(1);
        let first = member(admission.admit(peer(1), at(0)));
        admission.leave(&first);
        assert!(matches!(admission.admit(peer(1), at(0)), Admitted::Free(_)));
        assert_eq!(admission.len(), 1);
    }

    #[test]
    fn addresses_of_one_network_are_one_peer() {
        let of = |text: &str| Peer::of_address(text.parse().expect("an address"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
    }
}

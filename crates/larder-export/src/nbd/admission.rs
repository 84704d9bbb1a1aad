//! Admission of NBD clients: the clients that a server has at a time, and the choice of the one that is evicted for
//! another.
//!
//! A slot is for a client that has made a request. Until then a client waits in one of as many other slots, so that
//! silent clients keep no other out. The slots of each kind are shared equally among peers: the addresses that TCP
//! clients connect from, and the processes that connect over a unix socket. If all slots are taken, an idle client is
//! evicted for the next one. If no client is idle, a client of the peer that has the most is evicted for one of a
//! peer that has less than its share.

use std::cell::{Cell, OnceCell, RefCell};
use std::net::{IpAddr, Ipv6Addr};
use std::rc::Rc;
use std::time::Duration;

use larder_block::event_loop::{LoopTime, Socket};

use super::limits::Limits;

/// Times after which a client counts as idle: without any request so far, and since its last request.
const IDLE_AFTER_CONNECT: Duration = Duration::from_secs(10);
const IDLE_AFTER_REQUEST: Duration = Duration::from_secs(60);

/// Prefix length of the IPv6 network of one host: addresses with the same prefix are one peer.
const IPV6_HOST_BITS: u32 = 64;

/// Origin of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Peer {
    Address(IpAddr),
    Process(i32),
    /// Origin that the kernel does not reveal.
    Unknown,
}

impl Peer {
    /// Returns the peer at the other end of a socket.
    pub(super) fn of(socket: &Socket) -> Self {
        match (socket.peer_address(), socket.peer_pid()) {
            (Some(address), _) => Self::of_address(address),
            (None, Some(pid)) => Self::Process(pid),
            (None, None) => Self::Unknown,
        }
    }

    /// Returns the peer with an IP address.
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

/// Client that is connected, or about to be disconnected.
pub(super) struct Member {
    peer: Peer,
    /// Time of its connection, last request, or last reply.
    active_at: Cell<LoopTime>,
    has_slot: Cell<bool>,
    evicted: Cell<bool>,
    /// Requests in flight, once the handshake is over.
    limits: OnceCell<Rc<Limits>>,
}

impl Member {
    /// Sets the limits that count the client's requests; must be called only once.
    pub(super) fn set_limits(&self, limits: &Rc<Limits>) {
        let _ = self.limits.set(Rc::clone(limits));
    }

    /// Records that the client has made a request, or received a reply.
    pub(super) fn record_activity(&self, now: LoopTime) {
        self.active_at.set(now);
    }

    /// Returns whether the client has to be disconnected for another one.
    pub(super) fn is_evicted(&self) -> bool {
        self.evicted.get()
    }

    fn is_working(&self) -> bool {
        self.limits.get().is_some_and(|limits| limits.is_working())
    }

    fn is_idle(&self, now: LoopTime) -> bool {
        let limit = if self.has_slot.get() { IDLE_AFTER_REQUEST } else { IDLE_AFTER_CONNECT };
        !self.is_working() && now.since(self.active_at.get()) >= limit
    }
}

/// Clients of a server.
pub(super) struct Admission {
    clients_max: usize,
    members: RefCell<Vec<Rc<Member>>>,
}

/// Way in which a client got its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotSource {
    /// A slot was free.
    Free,
    /// Another client is evicted, as [`Member::is_evicted`] shows.
    Evicted,
}

/// Error if there is no slot for a client.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NoSlot;

impl Admission {
    pub(super) fn new(clients_max: usize) -> Self {
        Self { clients_max, members: RefCell::default() }
    }

    /// Admits a client of `peer` that connects at `now`.
    pub(super) fn connect(&self, peer: Peer, now: LoopTime) -> Result<(Rc<Member>, SlotSource), NoSlot> {
        let member = Rc::new(Member {
            peer,
            active_at: Cell::new(now),
            has_slot: Cell::new(false),
            evicted: Cell::new(false),
            limits: OnceCell::new(),
        });
        let source = self.find_slot(&member, now)?;
        self.members.borrow_mut().push(Rc::clone(&member));
        Ok((member, source))
    }

    /// Assigns a slot to a client that makes a request at `now`, unless it has one.
    pub(super) fn request(&self, member: &Member, now: LoopTime) -> Result<SlotSource, NoSlot> {
        let mut source = SlotSource::Free;
        if !member.has_slot.replace(true) {
            let made = self.find_slot(member, now);
            source = made.inspect_err(|_| member.has_slot.set(false))?;
        }
        member.record_activity(now);
        Ok(source)
    }

    /// Frees the slot of a client that has disconnected.
    pub(super) fn remove_client(&self, member: &Rc<Member>) {
        self.members.borrow_mut().retain(|other| !Rc::ptr_eq(other, member));
    }

    pub(super) fn len(&self) -> usize {
        self.members.borrow().len()
    }

    /// Makes room for a client among those that, like it, have a slot or have none.
    fn find_slot(&self, newcomer: &Member, now: LoopTime) -> Result<SlotSource, NoSlot> {
        let mut members = self.members.borrow_mut();
        let has_same_kind =
            |other: &Rc<Member>| other.has_slot == newcomer.has_slot && !std::ptr::eq(Rc::as_ptr(other), newcomer);
        let rivals: Vec<_> = members.iter().filter(|other| has_same_kind(other)).cloned().collect();
        if rivals.len() < self.clients_max {
            return Ok(SlotSource::Free);
        }
        let victim = choose_victim(&rivals, self.clients_max, newcomer.peer, now).ok_or(NoSlot)?;
        victim.evicted.set(true);
        members.retain(|other| !Rc::ptr_eq(other, victim));
        Ok(SlotSource::Evicted)
    }
}

/// Returns the client to evict for one of `peer`.
fn choose_victim(members: &[Rc<Member>], clients_max: usize, peer: Peer, now: LoopTime) -> Option<&Rc<Member>> {
    let mut peers: Vec<(Peer, usize)> = Vec::new();
    for member in members {
        match peers.iter_mut().find(|(known, _)| *known == member.peer) {
            Some((_, count)) => *count += 1,
            None => peers.push((member.peer, 1)),
        }
    }
    let count_of = |peer: Peer| {
        let found = peers.iter().find(|(known, _)| *known == peer);
        found.map_or(0, |(_, count)| *count)
    };
    let peer_count = count_of(peer);
    let share = (clients_max / (peers.len() + usize::from(peer_count == 0))).max(1);
    let longest_idle = |members: &mut dyn Iterator<Item = &'_ Rc<Member>>| {
        let longest = members.min_by_key(|member| (member.is_working(), member.active_at.get()));
        longest.map(Rc::as_ptr)
    };
    // A peer below its share keeps even its idle clients from a peer that has its share.
    let may_evict = |member: &Member| peer_count < share || member.peer == peer || count_of(member.peer) >= share;
    let mut idle = members.iter().filter(|member| member.is_idle(now) && may_evict(member));
    let found = longest_idle(&mut idle).or_else(|| {
        let (largest, count) = *peers.iter().max_by_key(|(_, count)| *count)?;
        let mut of_largest = members.iter().filter(|member| member.peer == largest);
        (peer_count < share && count > share).then(|| longest_idle(&mut of_largest)).flatten()
    })?;
    members.iter().find(|member| std::ptr::eq(Rc::as_ptr(member), found))
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

    fn silent(admission: &Admission, of: u8, second: u64) -> Option<Rc<Member>> {
        admission.connect(peer(of), at(second)).ok().map(|(member, _)| member)
    }

    /// Connects a client and makes a request, if there is room.
    fn busy(admission: &Admission, of: u8, second: u64) -> Option<Rc<Member>> {
        let member = silent(admission, of, second)?;
        admission.request(&member, at(second)).ok().map(|_| member)
    }

    fn evicted(members: &[Rc<Member>]) -> Vec<usize> {
        let evicted = members.iter().enumerate().filter(|(_, one)| one.is_evicted());
        evicted.map(|(index, _)| index).collect()
    }

    /// Clients without a request occupy no slot of active clients.
    #[test]
    fn silent_clients_take_no_slot() {
        let admission = Admission::new(4);
        let silent_ones: Vec<_> = (0..4).filter_map(|second| silent(&admission, 1, second)).collect();
        assert!(silent(&admission, 1, 9).is_none(), "none is silent for long enough");
        let other = busy(&admission, 2, 9).expect("its peer has no client yet");
        assert_eq!(evicted(&silent_ones), [0]);
        assert!(silent(&admission, 1, 9).is_some(), "the other client has a slot now");
        assert!(silent(&admission, 1, 11).is_some());
        assert_eq!(evicted(&silent_ones), [0, 1]);
        assert!(!other.is_evicted());
    }

    #[test]
    fn peers_that_only_connect_displace_no_busy_client() {
        let admission = Admission::new(4);
        let all: Vec<_> = (0..4).filter_map(|_| busy(&admission, 1, 100)).collect();
        for of in 2..200 {
            silent(&admission, of, 101);
        }
        assert_eq!((all.len(), evicted(&all)), (4, vec![]));
    }

    #[test]
    fn idle_clients_are_evicted() {
        let admission = Admission::new(2);
        let all: Vec<_> = (0..2).filter_map(|_| busy(&admission, 1, 0)).collect();
        all[1].record_activity(at(30));
        assert!(busy(&admission, 1, 59).is_none());
        assert!(busy(&admission, 1, 60).is_some());
        assert_eq!(evicted(&all), [0]);
        // Idle clients are also evicted for another peer that has its share.
        let admission = Admission::new(2);
        let idle = busy(&admission, 1, 0).expect("room");
        let _other = busy(&admission, 2, 60).expect("room");
        assert!(busy(&admission, 2, 60).is_some());
        assert!(idle.is_evicted());
    }

    #[test]
    fn peer_below_its_share_is_admitted() {
        let admission = Admission::new(4);
        let greedy: Vec<_> = (0..4).filter_map(|_| busy(&admission, 1, 0)).collect();
        let active = |(index, one): (usize, &Rc<Member>)| one.record_activity(at(10 - index as u64));
        greedy.iter().enumerate().for_each(active);
        let other = busy(&admission, 2, 10).expect("its peer has no client yet");
        assert_eq!(evicted(&greedy), [3], "the longest idle one");
        assert!(busy(&admission, 2, 10).is_some());
        assert!(busy(&admission, 2, 10).is_none(), "it has its share");
        assert!(busy(&admission, 1, 10).is_none(), "and so has the other one");
        assert!(!other.is_evicted());
        assert_eq!(evicted(&greedy).len(), 2);
    }

    #[test]
    fn excess_peers_replace_idle_clients() {
        let admission = Admission::new(2);
        let all: Vec<_> = (1..3).filter_map(|of| busy(&admission, of, u64::from(of))).collect();
        assert!(busy(&admission, 3, 50).is_none());
        assert!(busy(&admission, 3, 61).is_some());
        assert_eq!(evicted(&all), [0]);
    }

    #[test]
    fn slot_is_free_after_disconnect() {
        let admission = Admission::new(1);
        let first = busy(&admission, 1, 0).expect("room");
        admission.remove_client(&first);
        assert!(busy(&admission, 1, 0).is_some());
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

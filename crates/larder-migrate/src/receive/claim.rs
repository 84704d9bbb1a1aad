//! Ownership of a session by its sender, and the rules by which connections join it.

use std::sync::Arc;
use std::time::Duration;

use super::lane::Lane;
use crate::base::{Frontier, Slots};
use crate::decode::Bases;
use crate::wire::{ConnectionRole, Hello, LANES_MAX, Proof, SessionId, continues};

/// Maximum time that a sender may make a receiver wait for it.
const PATIENCE_MAX: Duration = Duration::from_secs(3600);

/// Parameters of the session on offer.
pub(super) struct Offer {
    pub(super) id: SessionId,
    pub(super) delta_memory: u64,
    pub(super) lanes: u16,
    /// True while the session has no link.
    pub(super) is_lost: bool,
    /// True if a sender that opens a new session may have the next one.
    pub(super) has_next: bool,
}

/// Result of a greeting that is accepted.
pub(super) enum Grant {
    /// New session for this sender.
    Session,
    /// Existing session, over another link.
    Link,
    /// Lane of the existing session.
    Lane(Arc<Lane>),
    /// Next session; the existing one ends.
    Next,
}

/// Claim on the session; `None` before the first control connection.
#[derive(Default)]
pub(super) struct Claim(Option<ClaimedSession>);

struct ClaimedSession {
    bases: Arc<Bases>,
    lanes: Vec<Arc<Lane>>,
    patience: Duration,
    link: u32,
    proof: Proof,
    /// Flags of the lanes that the current link has.
    connected_lanes: Vec<bool>,
}

impl Claim {
    /// Decides what a connection with this greeting gets, or returns why it gets nothing.
    pub(super) fn grant(&mut self, hello: &Hello, offer: &Offer) -> Result<Grant, &'static str> {
        const NO_SESSION: &str = "there is no such session here: this receiver was restarted, or the session has ended";
        const NO_LANE: &str = "there is no such session here, or it has all its lanes";
        let Some(claimed) = &mut self.0 else {
            return match (hello.role, hello.link) {
                (ConnectionRole::Control, 0) => {
                    self.0 = Some(ClaimedSession::new(hello, offer));
                    Ok(Grant::Session)
                }
                (ConnectionRole::Control, _) => Err(NO_SESSION),
                (ConnectionRole::Lane(_), _) => Err(NO_LANE),
            };
        };
        let is_same_session = hello.session == offer.id;
        match hello.role {
            ConnectionRole::Control if hello.link == 0 && offer.is_lost && offer.has_next => Ok(Grant::Next),
            ConnectionRole::Control if hello.link == 0 => Err("it is in the middle of a migration"),
            ConnectionRole::Control if !is_same_session => Err(NO_SESSION),
            ConnectionRole::Control => {
                if !continues((claimed.link, &claimed.proof), (hello.link, &hello.proof)) {
                    return Err("this session belongs to another sender");
                }
                (claimed.link, claimed.proof) = (hello.link, hello.proof);
                claimed.connected_lanes.fill(false);
                Ok(Grant::Link)
            }
            ConnectionRole::Lane(number) => {
                let at = usize::from(number);
                match claimed.lanes.get(at) {
                    Some(lane) if is_same_session && hello.link == claimed.link && !claimed.connected_lanes[at] => {
                        claimed.connected_lanes[at] = true;
                        Ok(Grant::Lane(Arc::clone(lane)))
                    }
                    _ => Err(NO_LANE),
                }
            }
        }
    }

    /// Revokes the grant to a connection that has broken before it was answered.
    pub(super) fn revoke(&mut self, hello: &Hello) {
        let Some(claimed) = &mut self.0 else { return };
        match hello.role {
            ConnectionRole::Control if hello.link == 0 => self.0 = None,
            ConnectionRole::Lane(number) if hello.link == claimed.link => {
                claimed.connected_lanes[usize::from(number)] = false
            }
            // The next link has another number.
            _ => {}
        }
    }

    /// Returns the delta state, the number of lanes, and the time to wait for the sender, once there is one.
    pub(super) fn terms(&self) -> Option<(Arc<Bases>, u16, Duration)> {
        let claimed = self.0.as_ref()?;
        Some((Arc::clone(&claimed.bases), claimed.lanes.len() as u16, claimed.patience))
    }

    /// Ends all waits for the sender's frames and connections.
    pub(super) fn stop(&self) {
        if let Some(claimed) = &self.0 {
            claimed.bases.frontier.stop();
            claimed.lanes.iter().for_each(|lane| lane.pending_link.stop());
        }
    }
}

impl ClaimedSession {
    fn new(hello: &Hello, offer: &Offer) -> Self {
        let lanes = hello.lanes.clamp(1, offer.lanes.clamp(1, LANES_MAX));
        Self {
            bases: Arc::new(Bases {
                slots: Slots::new(hello.delta_memory.min(offer.delta_memory)),
                frontier: Frontier::new(),
            }),
            lanes: (0..lanes).map(|number| Arc::new(Lane::new(number))).collect(),
            patience: Duration::from_millis(hello.patience_ms.into()).min(PATIENCE_MAX),
            link: hello.link,
            proof: hello.proof,
            connected_lanes: vec![false; usize::from(lanes)],
        }
    }
}

//! Hash chain by which the opener of a session authenticates each later link.
//!
//! Without TLS, an eavesdropper learns the number of a session. So the sender shows one more number on each link: the
//! SHA-256 of the next link's proof is this link's proof (Lamport, "Password authentication with insecure
//! communication", 1981). A proof that was overheard verifies the next one, but does not reveal it. The chain does
//! not protect from an attacker who can modify unencrypted traffic.

use ring::digest;
use ring::rand::SecureRandom;

/// Maximum links of a session: the number of times that its connections are made or tried.
pub const LINKS_MAX: u32 = 1 << 13;

/// Proof that a control connection shows.
pub type Proof = [u8; 32];

/// Proofs of a session's links.
pub struct ProofChain {
    /// Proof of the last link, [`LINKS_MAX`].
    last: Proof,
}

impl ProofChain {
    /// Draws a new chain at random; returns `None` if the system has no random numbers.
    #[must_use]
    pub fn new() -> Option<Self> {
        let mut last = [0; 32];
        ring::rand::SystemRandom::new().fill(&mut last).ok()?;
        Some(Self { last })
    }

    /// Returns the proof of `link`, which is at most [`LINKS_MAX`].
    #[must_use]
    pub fn proof(&self, link: u32) -> Proof {
        hash_times(self.last, LINKS_MAX.saturating_sub(link))
    }
}

/// Returns true if the proof of link `to` comes from the same chain as the proof of the earlier link `from`.
#[must_use]
pub fn continues((from, earlier): (u32, &Proof), (to, proof): (u32, &Proof)) -> bool {
    from < to && to <= LINKS_MAX && hash_times(*proof, to - from) == *earlier
}

fn hash_times(proof: Proof, times: u32) -> Proof {
    (0..times).fold(proof, |proof, _| {
        let hash = digest::digest(&digest::SHA256, &proof);
        hash.as_ref().try_into().expect("SHA-256 has 32 bytes")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Only proofs of the same chain, for later links, continue a session.
    #[test]
    fn only_session_opener_can_continue() {
        let chain = ProofChain::new().expect("random numbers");
        let (first, third) = (chain.proof(0), chain.proof(3));
        assert!(continues((0, &first), (3, &third)));
        assert!(continues((3, &third), (LINKS_MAX, &chain.proof(LINKS_MAX))));
        // Proofs that are replayed, given for a wrong link, or from another chain.
        assert!(!continues((0, &first), (3, &chain.proof(2))));
        assert!(!continues((3, &third), (3, &third)));
        assert!(!continues((3, &third), (0, &first)));
        assert!(!continues((3, &third), (4, &third)));
        let other = ProofChain::new().expect("random numbers");
        assert!(!continues((0, &first), (1, &other.proof(1))));
        assert!(!continues((0, &first), (u32::MAX, &other.proof(1))));
    }
}

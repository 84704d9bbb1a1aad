//! Who opened a session shows that it is the same one each time that it connects again.
//!
//! Without TLS whoever listens on the way knows the number of a session. So the sender says one more number with each
//! link, of which only the next one can be told from it: the SHA-256 of the next link's proof is this link's (Lamport,
//! "Password authentication with insecure communication", 1981). What was overheard is of no use for a later link. Whoever
//! can change what goes by unencrypted needs none of it.

use ring::digest;
use ring::rand::SecureRandom;

/// Links of a session, at most: times that its connections were made, or tried to be.
pub const LINKS_MAX: u32 = 1 << 13;

/// What a control connection shows.
pub type Proof = [u8; 32];

/// The proofs of a session's links.
pub struct Chain {
    /// The last one, of link [`LINKS_MAX`].
    last: Proof,
}

impl Chain {
    /// A new one; `None` if the system has no random numbers.
    #[must_use]
    pub fn new() -> Option<Self> {
        let mut last = [0; 32];
        ring::rand::SystemRandom::new().fill(&mut last).ok()?;
        Some(Self { last })
    }

    /// That of this link, up to [`LINKS_MAX`].
    #[must_use]
    pub fn proof(&self, link: u32) -> Proof {
        hashed(self.last, LINKS_MAX.saturating_sub(link))
    }
}

/// Whether the proof of link `to` is by whoever has shown that of link `from`.
#[must_use]
pub fn continues((from, before): (u32, &Proof), (to, proof): (u32, &Proof)) -> bool {
    from < to && to <= LINKS_MAX && hashed(*proof, to - from) == *before
}

fn hashed(proof: Proof, times: u32) -> Proof {
    (0..times).fold(proof, |proof, _| {
        let hash = digest::digest(&digest::SHA256, &proof);
        hash.as_ref().try_into().expect("SHA-256 has 32 bytes")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_began_can_go_on() {
        let chain = Chain::new().expect("random numbers");
        let (first, third) = (chain.proof(0), chain.proof(3));
        assert!(continues((0, &first), (3, &third)));
        assert!(continues((3, &third), (LINKS_MAX, &chain.proof(LINKS_MAX))));
        // What was heard before, as another link, or by somebody else.
        assert!(!continues((0, &first), (3, &chain.proof(2))));
        assert!(!continues((3, &third), (3, &third)));
        assert!(!continues((3, &third), (0, &first)));
        assert!(!continues((3, &third), (4, &third)));
        let other = Chain::new().expect("random numbers");
        assert!(!continues((0, &first), (1, &other.proof(1))));
        assert!(!continues((0, &first), (u32::MAX, &other.proof(1))));
    }
}

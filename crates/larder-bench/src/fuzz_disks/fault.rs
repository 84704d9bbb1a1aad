//! A difference between Larder and the model, or QEMU.

use std::fmt;

/// Kind of a fault that is QEMU's own: the case proves nothing about Larder.
pub(super) const QEMU_DAMAGE: &str = "damage by QEMU";

/// A violated invariant.
#[derive(Clone, Debug)]
pub struct Fault {
    /// Kind of the fault. A shortened case must fail with the same kind.
    pub kind: &'static str,
    /// Description of the expected and the observed state.
    pub what: String,
    /// Number of the step that failed.
    pub step: Option<usize>,
}

impl Fault {
    pub(super) fn new(kind: &'static str, what: impl Into<String>) -> Self {
        Self { kind, what: what.into(), step: None }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.step {
            Some(step) => write!(f, "{} at step {step}: {}", self.kind, self.what),
            None => write!(f, "{}: {}", self.kind, self.what),
        }
    }
}

impl From<std::io::Error> for Fault {
    fn from(error: std::io::Error) -> Self {
        Self::new("set-up", error.to_string())
    }
}

impl From<anyhow::Error> for Fault {
    fn from(error: anyhow::Error) -> Self {
        Self::new("request", format!("{error:#}"))
    }
}

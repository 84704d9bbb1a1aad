//! What the two movers tell one another, as JSON in notes.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Description;

/// The version of what is told here.
pub const VERSION: u32 = 1;

/// To the destination.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "tell")]
pub enum ToDestination {
    /// A VM would come: get ready for it.
    Prepare {
        /// [`VERSION`].
        version: u32,
        /// The source's QEMU and its VM.
        vm: Description,
        /// Capabilities of migration, by QEMU's names.
        capabilities: Vec<(String, bool)>,
        /// Parameters of migration, by QEMU's names.
        parameters: Value,
    },
    /// All has come; the source is stopped and will stay so: run it.
    Go {
        /// [`VERSION`].
        version: u32,
        /// The UUID of the VM, as QEMU knows it.
        uuid: String,
        /// Whether its processors run; else it stays stopped, as it was at the source.
        run: bool,
    },
    /// The link broke in the middle of post-copy: wait for the rest over a new session.
    Recover {
        /// [`VERSION`].
        version: u32,
    },
}

impl ToDestination {
    /// The version of the mover that says it.
    #[must_use]
    pub const fn version(&self) -> u32 {
        match self {
            Self::Prepare { version, .. } | Self::Go { version, .. } | Self::Recover { version } => *version,
        }
    }
}

/// To the source.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "tell")]
pub enum ToSource {
    /// QEMU waits.
    Prepared {
        /// The destination's QEMU.
        vm: Description,
        /// What the user should know.
        warnings: Vec<String>,
    },
    /// It cannot come, and nothing was changed.
    Refused {
        /// All reasons that were found.
        reasons: Vec<String>,
    },
    /// It runs here.
    Running,
    /// It does not run here, and never will.
    NotRunning {
        /// Why.
        reason: String,
    },
}

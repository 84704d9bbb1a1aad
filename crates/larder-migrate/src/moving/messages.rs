//! What the two movers tell one another, as JSON in notes.

use serde::{Deserialize, Serialize};

use super::Description;
use super::disks::DiskDescription;
use super::record::MoveId;
use super::settings::Settings;

/// The version of what is told here.
pub const VERSION: u32 = 4;

/// To the destination. Each is answered.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ToDestination {
    /// [`VERSION`].
    pub version: u32,
    /// Of which move.
    pub id: MoveId,
    /// What.
    pub tell: Tell,
}

/// What the source wants.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tell {
    /// A VM would come: get ready for it.
    Prepare {
        /// The source's QEMU and its VM.
        vm: Box<Description>,
        /// What both must be set to.
        settings: Settings,
        /// The disks that are served beside QEMU.
        disks: Vec<DiskDescription>,
    },
    /// What of a disk that goes along is hot; the hottest first, perhaps in several of these. Nothing depends on it.
    Hot {
        /// QEMU's character device.
        chardev: String,
        /// As the disk's server has told, and the one at the destination understands it.
        ranges: String,
    },
    /// The source is about to switch over to post-copy, from which there is no way back: check once more that the destination
    /// can receive memory by post-copy.
    CheckPostcopy,
    /// All has come, or post-copy has begun; the source is stopped and will stay so, and its disks that go along are closed
    /// there: open them, and run it.
    Go {
        /// Whether its processors run; else it stays stopped, as it was at the source.
        run: bool,
        /// The source has switched over to post-copy, and can never have it back.
        postcopy: bool,
    },
    /// The link broke in the middle of post-copy: wait for the rest over this session.
    Recover,
}

/// To the source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "tell")]
pub enum ToSource {
    /// QEMU waits.
    Prepared {
        /// What the user should know.
        warnings: Vec<String>,
        /// The servers of the disks wait there for them.
        disks: bool,
    },
    /// It was passed on, if it could be.
    Noted,
    /// Not so, and nothing was changed.
    Refused {
        /// All reasons that were found.
        reasons: Vec<String>,
    },
    /// It is the destination's, and was let run.
    Running {
        /// All of its memory is there; else post-copy goes on.
        whole: bool,
    },
    /// In post-copy: it was not let run there yet, and may be asked for again.
    NotYet {
        /// Why.
        reason: String,
    },
    /// It was not let run there, and never will be.
    NotRunning {
        /// Why.
        reason: String,
    },
    /// It was to be let run there, and whether it did is not known.
    Unknown {
        /// Why.
        reason: String,
    },
}

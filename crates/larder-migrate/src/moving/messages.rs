//! Messages between the two movers, as JSON in notes.

use serde::{Deserialize, Serialize};

use super::Description;
use super::disks::DiskDescription;
use super::record::MoveId;
use super::settings::QemuMigrationSettings;

/// Version of these messages.
pub const VERSION: u32 = 4;

/// Message to the destination. Each one is answered.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ToDestination {
    /// Version of the messages, [`VERSION`].
    pub version: u32,
    /// Number of the move.
    pub id: MoveId,
    /// Request.
    pub tell: MoverRequest,
}

/// Request of the source.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MoverRequest {
    /// Prepare to receive a VM.
    Prepare {
        /// Source's QEMU and its VM.
        vm: Box<Description>,
        /// Migration settings that both QEMUs must have.
        settings: QemuMigrationSettings,
        /// Disks that are served by processes beside QEMU.
        disks: Vec<DiskDescription>,
    },
    /// Hot ranges of a disk that moves along, the hottest first, perhaps in several messages. They are only a hint.
    Hot {
        /// Name of QEMU's character device.
        chardev: String,
        /// Ranges in the text format of the disk's server, which the destination's server parses.
        ranges: String,
    },
    /// Check once more that the destination can receive memory by post-copy. The source is about to switch to
    /// post-copy, which cannot be undone.
    CheckPostcopy,
    /// Run the VM. Its state has arrived, or post-copy has begun; the source is stopped and stays so, and its disks
    /// that move along are closed there. Open them first.
    Go {
        /// True if the VM is to run; otherwise it stays stopped, as it was at the source.
        run: bool,
        /// True if the source has switched to post-copy, and so can never have the VM back.
        postcopy: bool,
    },
    /// Wait for the rest of post-copy over this session: the link broke during post-copy.
    Recover,
}

/// Message to the source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "tell")]
pub enum ToSource {
    /// QEMU is waiting.
    Prepared {
        /// Warnings for the user.
        warnings: Vec<String>,
        /// True if the disks' servers wait for them at the destination.
        disks: bool,
    },
    /// Acknowledges a message that needs no other answer; a hint was forwarded if possible.
    Noted,
    /// Refuses the request; nothing was changed.
    Refused {
        /// All reasons that were found.
        reasons: Vec<String>,
    },
    /// The VM belongs to the destination and was started there.
    Running {
        /// True if all of its memory has arrived; otherwise post-copy continues.
        whole: bool,
    },
    /// In post-copy: the VM was not started yet, and the request may be repeated.
    NotYet {
        /// Reason why.
        reason: String,
    },
    /// The VM was not started, and never will be.
    NotRunning {
        /// Reason why.
        reason: String,
    },
    /// The VM was to be started, and the result is unknown.
    Unknown {
        /// Reason why.
        reason: String,
    },
}

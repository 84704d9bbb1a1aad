//! Facts that a parser has found.

use std::fmt;

/// Kind of a channel, determined from its first bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ChannelKind {
    /// Too few bytes have arrived to determine the kind.
    #[default]
    Undecided,
    /// Main channel.
    Main,
    /// Main channel that has reconnected in post-copy.
    Resumed,
    /// Post-copy's second channel, with pages that the destination waits for.
    Preempt,
    /// Multifd channel.
    Multifd {
        /// Number of the channel at the source.
        id: u8,
    },
    /// Other bytes, such as TLS: all are literal.
    Opaque,
}

/// Phase of a main channel.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum StreamPhase {
    /// Configuration, and the list of what is migrated.
    #[default]
    Setup,
    /// Memory, while the source runs or has just stopped.
    Ram,
    /// Memory, while the destination runs or is about to: its device state has been sent.
    Postcopy,
    /// Device state, after all memory. Everything that follows is literal.
    DeviceState,
    /// The stream has sent its end.
    Ended,
}

/// Facts that a parser has found in its channel.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StreamFacts {
    /// Kind of the channel.
    pub channel: ChannelKind,
    /// Phase, if the channel is a main channel.
    pub phase: StreamPhase,
    /// Counter of changes to fields that are not counters themselves, so that a watcher need not compare them all.
    pub changes: u64,
    /// Bytes parsed.
    pub bytes: u64,
    /// Pages that were reported.
    pub pages: u64,
    /// Pages with plain content that were not reported: split by [`pass`](super::Parser::pass), or of an unknown
    /// block.
    pub pages_unreported: u64,
    /// Pages that the stream declares as zero.
    pub zero_pages: u64,
    /// Pages that QEMU has encoded itself: XBZRLE, or compressed. They are literal.
    pub encoded_pages: u64,
    /// Number of RAM sections that ended: about one every 50 ms while the source runs.
    pub ram_sections: u64,
    /// Number of times that the pages of a main channel restarted from a lower address: about the number of passes
    /// over all memory, less one. Not counted once post-copy has begun, nor for pages on multifd channels.
    pub passes: u64,
    /// Number of times that the main channel made the destination wait for the multifd channels (from machine type
    /// 8.1 on: once per pass over all memory).
    pub multifd_flushes: u64,
    /// Number of syncs on a multifd channel (up to machine type 8.0 with each section of RAM, later with each flush).
    pub multifd_syncs: u64,
    /// Packets of a multifd channel, including those without pages.
    pub packets: u64,
    /// Packets among them with device state, and no memory.
    pub device_packets: u64,
    /// Number of times that the parser lost its place. The bytes after that are literal until it recognises a
    /// structure.
    pub losses: u64,
    /// Set once the destination was asked to open the return path.
    pub return_path: bool,
    /// Set if the source may switch to post-copy.
    pub postcopy_advised: bool,
    /// Page sizes of memory on the source, or-ed, if it may switch to post-copy; 0 if unknown.
    pub page_sizes: u64,
    /// Set once the device state of post-copy has begun, and the destination is asked to listen for pages.
    pub postcopy_listen: bool,
    /// Set once the device state of post-copy is complete, and the destination is asked to run.
    pub postcopy_run: bool,
    /// Set if post-copy continues after an interruption.
    pub postcopy_resumed: bool,
    /// Set once the source has stopped and switches over (from machine type 10.0 on).
    pub switchover_start: bool,
    /// Set if the migration is for COLO, and does not end.
    pub colo: bool,
    /// Set if memory in shared files is not sent.
    pub ignore_shared: bool,
    /// Set once QEMU has sent the end of all memory.
    pub ram_ended: bool,
    /// Machine type, such as `pc-q35-7.2`.
    pub machine: MachineType,
}

impl StreamFacts {
    /// Returns the oldest release of QEMU (major and minor) that can send this, by its machine type and by features
    /// that only later ones send. QEMU 10 with machine type 7.2 sends the same as QEMU 7.2.
    pub fn qemu_at_least(&self) -> Option<(u16, u16)> {
        let versions = [
            self.machine.version(),
            (self.multifd_flushes > 0).then_some((8, 1)),
            (matches!(self.channel, ChannelKind::Multifd { .. }) && self.zero_pages > 0).then_some((9, 0)),
            self.switchover_start.then_some((10, 0)),
        ];
        versions.into_iter().flatten().max()
    }

    /// Counts a change of a field that is not a counter.
    pub(super) fn count_change(&mut self) {
        self.changes += 1;
    }
}

/// Name of a machine type, its first 64 bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct MachineType {
    name: [u8; 64],
    len: u8,
}

impl MachineType {
    pub(super) fn new(name: &[u8]) -> Self {
        let mut machine = Self::default();
        let len = name.len().min(machine.name.len());
        machine.name[..len].copy_from_slice(&name[..len]);
        machine.len = len as u8;
        machine
    }

    /// Returns the name, or an empty string if it is unknown or not UTF-8.
    pub fn name(&self) -> &str {
        std::str::from_utf8(&self.name[..usize::from(self.len)]).unwrap_or("")
    }

    /// Returns the release at its end: 7 and 2 of `pc-q35-7.2`.
    pub fn version(&self) -> Option<(u16, u16)> {
        let (_, version) = self.name().rsplit_once('-')?;
        let (major, minor) = version.split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    }
}

impl Default for MachineType {
    fn default() -> Self {
        Self { name: [0; 64], len: 0 }
    }
}

impl fmt::Debug for MachineType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.name(), f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_type_yields_release() {
        assert_eq!(MachineType::new(b"pc-i440fx-7.2").version(), Some((7, 2)));
        assert_eq!(MachineType::new(b"pc-q35-10.0").version(), Some((10, 0)));
        assert_eq!(MachineType::new(b"microvm").version(), None);
        assert_eq!(MachineType::new(&[0xff; 300]).version(), None);
        let facts =
            StreamFacts { machine: MachineType::new(b"pc-q35-7.2"), multifd_flushes: 1, ..StreamFacts::default() };
        assert_eq!(facts.qemu_at_least(), Some((8, 1)));
    }
}

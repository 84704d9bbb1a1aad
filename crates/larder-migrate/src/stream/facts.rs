//! What a parser has come across.

use std::fmt;

/// What a channel is, by its first bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Channel {
    /// Fewer bytes than it takes to know.
    #[default]
    Undecided,
    /// The main channel.
    Main,
    /// The main channel again, connected anew in post-copy.
    Resumed,
    /// Post-copy's second channel, of pages that are waited for.
    Preempt,
    /// A multifd channel.
    Multifd {
        /// Which, as the source numbers them.
        id: u8,
    },
    /// Something else, such as TLS: all of it is literal.
    Opaque,
}

/// How far a main channel has come.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Phase {
    /// Configuration, and what is migrated.
    #[default]
    Setup,
    /// Memory, while the source runs, or has just stopped.
    Ram,
    /// Memory, while the destination runs or is about to: its device state has been sent.
    Postcopy,
    /// Device state, after all memory. All that follows is literal.
    DeviceState,
    /// The stream says that it ends.
    Ended,
}

/// What a parser has come across. Each channel has its own.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Facts {
    /// What the channel is.
    pub channel: Channel,
    /// How far it has come, if it is a main channel.
    pub phase: Phase,
    /// Goes up whenever something here changes that is not a count, so that who watches need not compare all.
    pub changes: u64,
    /// Bytes looked at.
    pub bytes: u64,
    /// Pages that were told.
    pub pages: u64,
    /// Pages that were sent as they are and not told: cut by [`pass`](super::Parser::pass), or of a block that is not known.
    pub pages_untold: u64,
    /// Pages of which the stream says that they are zero.
    pub zero_pages: u64,
    /// Pages that QEMU has encoded itself: XBZRLE, or compressed. They are literal.
    pub encoded_pages: u64,
    /// How often a section of RAM ended: about every 50 ms while the source runs.
    pub ram_sections: u64,
    /// How often the pages of a main channel began again from a lower place: about how often all memory was gone over,
    /// less one. Not counted once post-copy has begun, nor for pages on multifd channels.
    pub passes: u64,
    /// How often the main channel told the destination to wait for the multifd channels (from machine type 8.1 on:
    /// once each time that all memory was gone over).
    pub multifd_flushes: u64,
    /// How often a multifd channel was told so (up to machine type 8.0 with each section of RAM, later with each flush).
    pub multifd_syncs: u64,
    /// Packets of a multifd channel, those without pages too.
    pub packets: u64,
    /// Packets of them that have device state, and none of memory.
    pub device_packets: u64,
    /// How often the parser did not understand what it saw. What follows is literal up to a place that it knows again.
    pub losses: u64,
    /// The destination was asked to open the return path.
    pub return_path: bool,
    /// The source may switch to post-copy.
    pub postcopy_advised: bool,
    /// Page sizes of memory on the source, or-ed, if it may switch to post-copy; 0 if that is not known.
    pub page_sizes: u64,
    /// The device state of post-copy has begun, and the destination is asked to listen for pages.
    pub postcopy_listen: bool,
    /// The device state of post-copy is complete, and the destination is asked to run.
    pub postcopy_run: bool,
    /// Post-copy goes on after it was interrupted.
    pub postcopy_resumed: bool,
    /// The source has stopped and switches over (from machine type 10.0 on).
    pub switchover_start: bool,
    /// It is for COLO, and does not end.
    pub colo: bool,
    /// Memory in shared files is not sent.
    pub ignore_shared: bool,
    /// QEMU says that it has sent all memory.
    pub ram_ended: bool,
    /// The machine type, such as `pc-q35-7.2`.
    pub machine: Machine,
}

impl Facts {
    /// The oldest release of QEMU that this can be from (major and minor), by its machine type and by what only later ones
    /// send. QEMU 10 with machine type 7.2 sends what QEMU 7.2 would.
    pub fn qemu_at_least(&self) -> Option<(u16, u16)> {
        let signs = [
            self.machine.version(),
            (self.multifd_flushes > 0).then_some((8, 1)),
            (matches!(self.channel, Channel::Multifd { .. }) && self.zero_pages > 0).then_some((9, 0)),
            self.switchover_start.then_some((10, 0)),
        ];
        signs.into_iter().flatten().max()
    }

    /// Something changed that is not a count.
    pub(super) fn changed(&mut self) {
        self.changes += 1;
    }
}

/// The name of a machine type, its first 64 bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Machine {
    name: [u8; 64],
    len: u8,
}

impl Machine {
    pub(super) fn of(name: &[u8]) -> Self {
        let mut machine = Self::default();
        let len = name.len().min(machine.name.len());
        machine.name[..len].copy_from_slice(&name[..len]);
        machine.len = len as u8;
        machine
    }

    /// It, or an empty string if it is not known or is not UTF-8.
    pub fn name(&self) -> &str {
        std::str::from_utf8(&self.name[..usize::from(self.len)]).unwrap_or("")
    }

    /// The release that it ends with: 7 and 2 of `pc-q35-7.2`.
    pub fn version(&self) -> Option<(u16, u16)> {
        let (_, version) = self.name().rsplit_once('-')?;
        let (major, minor) = version.split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    }
}

impl Default for Machine {
    fn default() -> Self {
        Self { name: [0; 64], len: 0 }
    }
}

impl fmt::Debug for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.name(), f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_type_says_its_release() {
        assert_eq!(Machine::of(b"pc-i440fx-7.2").version(), Some((7, 2)));
        assert_eq!(Machine::of(b"pc-q35-10.0").version(), Some((10, 0)));
        assert_eq!(Machine::of(b"microvm").version(), None);
        assert_eq!(Machine::of(&[0xff; 300]).version(), None);
        let facts = Facts {
            machine: Machine::of(b"pc-q35-7.2"),
            multifd_flushes: 1,
            ..Facts::default()
        };
        assert_eq!(facts.qemu_at_least(), Some((8, 1)));
    }
}

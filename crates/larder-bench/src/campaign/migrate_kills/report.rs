//! Faults in the moves of [`super`], and their outcomes.

use std::fmt;

use clap::ValueEnum;

use super::super::migration::vm::counted;
use super::Disks;

/// Fault in a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Fault {
    /// No fault
    Nothing,
    /// Cut all connections, which can be made again
    CutLink,
    /// Stall the link for 12 s, then cut all connections, which can be made again
    StallLink,
    /// Cut all connections, with a mover that was told not to make them again
    LoseLink,
    /// Kill the mover and restart it
    KillMover,
    /// Kill the receiver and restart it
    KillReceiver,
    /// Kill the source's QEMU
    KillSource,
    /// Kill the destination's QEMU
    KillDestination,
    /// Tell the mover to stop
    Cancel,
    /// Kill the server of the source's disk and restart it
    KillServer,
    /// Kill the server of the destination's disk and restart it
    KillServerThere,
    /// Kill all processes at the source, and restart only the disk's server
    KillHost,
    /// Kill all processes at the destination, and restart only the disk's server
    KillHostThere,
}

impl Fault {
    /// All faults of moves without disks.
    pub const ALL: [Self; 9] = [
        Self::Nothing,
        Self::CutLink,
        Self::StallLink,
        Self::LoseLink,
        Self::KillMover,
        Self::KillReceiver,
        Self::KillSource,
        Self::KillDestination,
        Self::Cancel,
    ];

    /// All faults of moves with disks.
    pub const WITH_DISKS: [Self; 13] = [
        Self::Nothing,
        Self::KillServer,
        Self::KillServerThere,
        Self::KillMover,
        Self::KillReceiver,
        Self::KillSource,
        Self::KillDestination,
        Self::KillHost,
        Self::KillHostThere,
        Self::CutLink,
        Self::Cancel,
        Self::StallLink,
        Self::LoseLink,
    ];

    /// Returns whether the fault kills the source's QEMU.
    pub(super) const fn kills_source(self) -> bool {
        matches!(self, Self::KillSource | Self::KillHost)
    }

    pub(super) const fn kills_destination(self) -> bool {
        matches!(self, Self::KillDestination | Self::KillHostThere)
    }
}

/// Location of the guest after a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Source,
    Destination,
    /// The QEMU that ran the guest was killed.
    Lost,
}

/// Stage of a move at the time of the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The guest runs at the source.
    Before,
    /// The guest is paused, or runs at the destination and the mover has not learned that yet.
    HandOver,
    /// The mover has exited.
    After,
}

/// Outcomes of the moves, by fault and stage.
#[derive(Debug, Default)]
pub struct Report {
    /// Number of moves.
    pub moves: u32,
    rows: Vec<((Fault, Stage), [u32; 3])>,
    /// Ticks that the guests have counted.
    pub ticks: u64,
}

impl Report {
    pub(super) fn count(&mut self, key: (Fault, Stage), place: Place) {
        self.moves += 1;
        let at = self.rows.iter().position(|(of, _)| *of == key).unwrap_or_else(|| {
            self.rows.push((key, [0; 3]));
            self.rows.len() - 1
        });
        self.rows[at].1[place as usize] += 1;
    }

    /// Checks a guest that has ended, given the consoles of all its QEMUs.
    pub(super) fn ends(&mut self, consoles: &[String], disks: Option<Disks>) -> anyhow::Result<()> {
        let ticks = counted(consoles)?;
        self.ticks += ticks;
        disks.map_or(Ok(()), |disks| disks.end(ticks))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "{} moves; the guest has counted to {} without a gap or a mismatch", self.moves, self.ticks)?;
        writeln!(out, "| fault | at the source | at the destination | lost with its QEMU |\n|---|---|---|---|")?;
        let mut rows: Vec<_> = self.rows.iter().collect();
        rows.sort_by_key(|((fault, stage), _)| (*fault as u32, *stage as u32));
        for ((fault, stage), [source, destination, lost]) in rows {
            writeln!(out, "| {fault:?} {stage} | {source} | {destination} | {lost} |")?;
        }
        Ok(())
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Before => "before the hand-over",
            Self::HandOver => "during the hand-over",
            Self::After => "after the move",
        })
    }
}

//! What happens in the moves of [`super`], and what comes of it.

use std::fmt;

use clap::ValueEnum;

use super::super::migration::vm::counted;
use super::Disks;

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Fault {
    /// It just moves
    Nothing,
    /// All connections end, and can be made again
    CutLink,
    /// Nothing goes over for 12 s, then all connections end, and can be made again
    StallLink,
    /// All connections end, and the mover was told not to make them again
    LoseLink,
    /// The mover is killed, and started again
    KillMover,
    /// The receiver is killed, and started again
    KillReceiver,
    /// The source's QEMU is killed
    KillSource,
    /// The destination's QEMU is killed
    KillDestination,
    /// The mover is told to stop
    Cancel,
    /// The server of the source's disk is killed, and started again
    KillServer,
    /// The server of the destination's disk is killed, and started again
    KillServerThere,
    /// All at the source is killed, and of it only the disk's server started again
    KillHost,
    /// All at the destination is killed, and of it only the disk's server started again
    KillHostThere,
}

impl Fault {
    /// Each of them.
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

    /// And with disks.
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

    /// Its source's QEMU is killed.
    pub(super) const fn ends_source(self) -> bool {
        matches!(self, Self::KillSource | Self::KillHost)
    }

    pub(super) const fn ends_destination(self) -> bool {
        matches!(self, Self::KillDestination | Self::KillHostThere)
    }
}

/// Where the guest is in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Source,
    Destination,
    /// The QEMU that had it was killed.
    Lost,
}

/// How far a move is when something happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The guest runs at the source.
    Before,
    /// It stands still, or runs at the destination and the mover does not know so yet.
    HandOver,
    /// The mover has ended.
    After,
}

/// What came of the moves, by what happened, and when.
#[derive(Debug, Default)]
pub struct Report {
    /// Moves.
    pub moves: u32,
    rows: Vec<((Fault, Stage), [u32; 3])>,
    /// How far the guests have counted.
    pub ticks: u64,
}

impl Report {
    pub(super) fn count(&mut self, what: (Fault, Stage), place: Place) {
        self.moves += 1;
        let at = self.rows.iter().position(|(of, _)| *of == what).unwrap_or_else(|| {
            self.rows.push((what, [0; 3]));
            self.rows.len() - 1
        });
        self.rows[at].1[place as usize] += 1;
    }

    /// A guest has ended, of which these are the consoles.
    pub(super) fn ends(&mut self, consoles: &[String], disks: Option<Disks>) -> anyhow::Result<()> {
        let ticks = counted(consoles)?;
        self.ticks += ticks;
        disks.map_or(Ok(()), |disks| disks.end(ticks))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            out,
            "{} moves; the guest has counted to {} without a gap or a mismatch",
            self.moves, self.ticks
        )?;
        writeln!(
            out,
            "| what happened | stayed | moved | lost with its QEMU |\n|---|---|---|---|"
        )?;
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
            Self::HandOver => "in it",
            Self::After => "after it",
        })
    }
}

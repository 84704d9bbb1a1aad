//! The cache of a disk whose server is killed: its options, and how much of it the next server still has.

use std::fmt;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::ValueEnum;
use serde_json::Value;

/// Handling of writes by the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CacheMode {
    /// Write-through
    Wt,
    /// Write-around
    Wa,
    /// Pass-through
    Pt,
    /// Write-back
    Wb,
}

impl CacheMode {
    /// Name of the mode on a command line.
    pub fn word(self) -> &'static str {
        match self {
            Self::Wt => "wt",
            Self::Wa => "wa",
            Self::Pt => "pt",
            Self::Wb => "wb",
        }
    }

    /// Returns whether written data may exist in the cache alone.
    pub fn keeps_dirty(self) -> bool {
        self == Self::Wb
    }

    /// Modes that some servers are started with instead, in a campaign with this mode.
    pub fn others(self) -> &'static [Self] {
        match self {
            Self::Wb => &[Self::Wt, Self::Wa, Self::Pt],
            Self::Wt => &[Self::Wa, Self::Pt],
            Self::Wa | Self::Pt => &[Self::Wt],
        }
    }
}

/// Cache options of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TestCacheOptions {
    /// Handling of writes.
    pub mode: CacheMode,
    /// Bytes of the cache's file.
    pub size: u64,
}

/// Cache statistics that a server reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holds {
    /// Bytes of the cached lines.
    pub cached_bytes: u64,
    /// Bytes of cached lines that a kill may lose because their metadata is not checkpointed.
    pub uncheckpointed_bytes: u64,
    /// Bytes of the dirty lines, which only the cache has.
    pub dirty_bytes: u64,
    /// Bytes that were read from the cache.
    pub hit_bytes: u64,
    /// Bytes that are compared with the disk before they are used.
    pub unproven: u64,
}

impl Holds {
    /// Reads the statistics from a server's control socket.
    ///
    /// # Errors
    /// If the server does not answer, or has no working cache.
    pub fn ask(control: &Path) -> anyhow::Result<Self> {
        let answer = get_disks(control).with_context(|| format!("querying {}", control.display()))?;
        let cache = &answer["disks"][0]["cache"];
        ensure!(cache["state"] == "works", "the cache does not work: {answer}");
        let counter = |name: &str| {
            let value = cache[name].as_u64();
            value.with_context(|| format!("{name} is not reported: {answer}"))
        };
        Ok(Self {
            cached_bytes: counter("occupancy")?,
            uncheckpointed_bytes: counter("unsettled")?,
            dirty_bytes: counter("dirty")?,
            hit_bytes: counter("hit_bytes")?,
            unproven: counter("unproven")?,
        })
    }

    /// Waits until a server has loaded its cache: all that was checkpointed `before`, or, if the cache reaches less,
    /// until it no longer grows.
    ///
    /// # Errors
    /// As in [`Holds::ask`].
    pub fn loaded(control: &Path, before: Self) -> anyhow::Result<Self> {
        let mut last = Self::ask(control)?;
        let mut since = Instant::now();
        while last.cached_bytes < before.cached_bytes - before.uncheckpointed_bytes.min(before.cached_bytes)
            && since.elapsed() < STEADY_TIME
        {
            std::thread::sleep(ASKED_EVERY);
            let now = Self::ask(control)?;
            if now.cached_bytes > last.cached_bytes {
                since = Instant::now();
            }
            last = now;
        }
        Ok(last)
    }
}

/// Time without growth after which a cache counts as loaded.
const STEADY_TIME: Duration = Duration::from_millis(200);
const ASKED_EVERY: Duration = Duration::from_millis(2);

/// Time within which a server must answer.
const ANSWERS_MAX: Duration = Duration::from_secs(30);

fn get_disks(control: &Path) -> anyhow::Result<Value> {
    let mut stream = UnixStream::connect(control)?;
    stream.set_read_timeout(Some(ANSWERS_MAX))?;
    stream.write_all(b"GET /v1/disks HTTP/1.1\r\nHost: larder\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no HTTP response")?;
    ensure!(head.starts_with("HTTP/1.1 200"), "{answer}");
    Ok(serde_json::from_str(body)?)
}

/// Share of cached data that survived the kills of servers.
#[derive(Clone, Debug, Default)]
pub struct CacheRetention {
    /// Bytes cached after a kill, over the bytes before.
    of_all: Vec<f64>,
    /// Bytes cached after a kill, over the checkpointed bytes before; at most 1.
    of_settled: Vec<f64>,
    /// Bytes that a read of the whole disk found in the cache, over the cached bytes.
    reread: Vec<f64>,
}

impl CacheRetention {
    /// Records the cache's state before and after a kill; empty caches are not counted.
    pub fn killed(&mut self, before: Holds, after: Holds) {
        let share = |of: u64| after.cached_bytes as f64 / of as f64;
        if before.cached_bytes > 0 {
            self.of_all.push(share(before.cached_bytes));
        }
        if before.cached_bytes > before.uncheckpointed_bytes {
            self.of_settled.push(share(before.cached_bytes - before.uncheckpointed_bytes).min(1.0));
        }
    }

    /// Records a read of the whole disk between the two states.
    pub fn reread(&mut self, from: Holds, to: Holds) {
        if from.cached_bytes > 0 {
            let found = to.hit_bytes - from.hit_bytes;
            self.reread.push((found as f64 / from.cached_bytes as f64).min(1.0));
        }
    }

    /// Adds all of another sample.
    pub fn add(&mut self, other: Self) {
        self.of_all.extend(other.of_all);
        self.of_settled.extend(other.of_settled);
        self.reread.extend(other.reread);
    }

    /// Median share of the checkpointed lines that survived a kill, 0 to 1.
    pub fn of_settled(&self) -> Option<f64> {
        median_and_min(&self.of_settled).map(|(median, _)| median)
    }
}

fn median_and_min(shares: &[f64]) -> Option<(f64, f64)> {
    let mut sorted = shares.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    Some((*sorted.get((sorted.len().max(1) - 1) / 2)?, *sorted.first()?))
}

impl fmt::Display for CacheRetention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let format_shares = |shares: &[f64]| match median_and_min(shares) {
            Some((median, least)) => format!("P50 {:.2} %, least {:.2} %", median * 100.0, least * 100.0),
            None => "none".to_owned(),
        };
        write!(
            f,
            "{} caches after a kill: share of cached lines kept: {}; of checkpointed lines: {}",
            self.of_all.len(),
            format_shares(&self.of_all),
            format_shares(&self.of_settled)
        )?;
        match self.reread.is_empty() {
            true => Ok(()),
            false => write!(f, "; share of cached bytes hit by a read of the disk: {}", format_shares(&self.reread)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    /// Lines without checkpointed metadata do not lower the share of checkpointed ones.
    fn unsettled_lines_are_counted_separately() {
        let stats =
            |bytes, unsettled| Holds { cached_bytes: bytes, uncheckpointed_bytes: unsettled, ..Holds::default() };
        let mut retention = CacheRetention::default();
        retention.killed(stats(0, 0), stats(0, 0));
        assert_eq!(retention.of_settled(), None);
        retention.killed(stats(100, 20), stats(80, 0));
        retention.killed(stats(100, 20), stats(90, 0));
        assert_eq!((retention.of_all.as_slice(), retention.of_settled()), (&[0.8, 0.9][..], Some(1.0)));
        retention.killed(stats(100, 20), stats(40, 0));
        assert_eq!(median_and_min(&retention.of_settled), Some((1.0, 0.5)));
    }
}

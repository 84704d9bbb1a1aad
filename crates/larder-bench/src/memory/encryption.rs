//! The part `encryption`: the pager's cost of encrypting a swap cache.
//!
//! The cipher alone is measured in this process. The path to the disk is measured as the CPU time of a pager that
//! evicts memory to a swap cache, with and without encryption in alternate rounds.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use larder_memory::crypt::{Cipher, KEY_BYTES};
use larder_memory::entry::Tier;
use larder_memory::segment_log::SEGMENT_BYTES;

use super::Arguments;
use super::faults::start;
use crate::campaign::find_larder;
use crate::campaign::memory::Attach;
use crate::figures::median;
use crate::prefetch::place::Place;

/// Memory that stays of the program's 256 MiB: nearly all of it is written to the disk.
const BUDGET: &str = "40MiB";
const COMPRESSED: &str = "6MiB";
/// Size of the swap cache, large enough for all of the program's memory.
const ROOM: &str = "1GiB";
/// Bytes written to the disk at the end of a round.
const WRITTEN: u64 = 96 << 20;
const ROUNDS: usize = 7;
/// Duration of the measurement of the cipher alone.
const CIPHER_TIME: Duration = Duration::from_secs(2);
const PAGE: usize = 4096;

/// Resources that a pager has used when it has written [`WRITTEN`] bytes.
struct Round {
    cpu_s: f64,
    written_mib: f64,
    wall_s: f64,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let larder = find_larder(arguments.larder.as_deref())?;
    let scratch = Place::new(&arguments.folder)?;
    let mut rounds: [Vec<Round>; 2] = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (index, encrypt) in ["off", "on"].into_iter().enumerate() {
            rounds[index].push(evict(&larder, &scratch, encrypt)?);
        }
    }
    println!("\nMedians of {ROUNDS} rounds.\n");
    println!("| --encrypt | CPU of the pager, ms per MiB written | MiB/s written |");
    println!("| --- | --- | --- |");
    for (encrypt, rounds) in ["off", "on"].into_iter().zip(&rounds) {
        let medians_of = |value: fn(&Round) -> f64| median(&rounds.iter().map(value).collect::<Vec<_>>());
        println!(
            "| {encrypt} | {:.2} | {:.0} |",
            medians_of(|round| round.cpu_s * 1e3 / round.written_mib),
            medians_of(|round| round.written_mib / round.wall_s)
        );
    }
    let (segment, page) = (cipher(SEGMENT_BYTES, false), cipher(PAGE, true));
    println!(
        "\nThe cipher alone, on one processor: a segment of 1 MiB is encrypted in {:.0} us ({:.0} MB/s), a page of 4 KiB \
         decrypted in {:.2} us.",
        segment * 1e6,
        SEGMENT_BYTES as f64 / segment / 1e6,
        page * 1e6
    );
    Ok(())
}

fn evict(larder: &Path, scratch: &Place, encrypt: &str) -> anyhow::Result<Round> {
    let (_program, pid) = start()?;
    let directory = scratch.unused("pager");
    std::fs::create_dir(&directory)?;
    let swap = scratch.unused("swap").display().to_string();
    let memory_options = ["--budget", BUDGET, "--compressed", COMPRESSED];
    let disk = ["--swap-cache", &swap, "--swap-size", ROOM, "--encrypt", encrypt];
    let started = Instant::now();
    let attach = Attach::new(larder, &directory, pid, &[&memory_options[..], &disk].concat());
    let mut pager = attach.start()?;
    let state = pager.wait_until(|state| state.disks.iter().any(|disk| disk.written_bytes >= WRITTEN))?;
    let round = Round {
        cpu_s: cpu_s(pager.process.id())?,
        written_mib: state.disks.iter().map(|disk| disk.written_bytes).sum::<u64>() as f64 / f64::from(1 << 20),
        wall_s: started.elapsed().as_secs_f64(),
    };
    pager.detach()?;
    Ok(round)
}

/// Returns the CPU time that a process has used in all its threads.
fn cpu_s(pid: u32) -> anyhow::Result<f64> {
    let mut ns = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
        let first = text.split_whitespace().next().context("schedstat is empty")?;
        ns += first.parse::<u64>()?;
    }
    Ok(ns as f64 / 1e9)
}

/// Returns the seconds per operation on `bytes` bytes.
fn cipher(bytes: usize, decrypts: bool) -> f64 {
    let cipher = Cipher::new(&[7; KEY_BYTES].into());
    let mut data = vec![0x5a; bytes];
    let (started, mut operations) = (Instant::now(), 0_u64);
    while started.elapsed() < CIPHER_TIME {
        for _ in 0..64 {
            let at = operations * bytes as u64;
            match decrypts {
                true => cipher.decrypt(Tier::Ssd, at, &mut data),
                false => cipher.encrypt(Tier::Ssd, at, &mut data),
            }
            operations += 1;
        }
    }
    std::hint::black_box(&data);
    started.elapsed().as_secs_f64() / operations as f64
}

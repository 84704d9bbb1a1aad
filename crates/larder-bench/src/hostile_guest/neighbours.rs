//! Other clients of the disk: over NBD, one that reads and one that writes random 4 KiB blocks, one request at a
//! time.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use larder_block::nbd::Command;

use super::watch::Flag;
use crate::discard::client::Client;
use crate::vhost_user::client::Random;

const BLOCK: u64 = 4096;

/// Pause after each request.
const PAUSE: Duration = Duration::from_millis(2);

/// The reader and the writer.
pub(super) struct Neighbours {
    clients: [(Client, Command, Random); 2],
}

/// Latencies of one client's requests, in ascending order.
#[derive(Clone, Debug, Default)]
pub(super) struct Latencies(Vec<Duration>);

impl Latencies {
    fn of_hundred(&self, part: usize) -> Duration {
        // The smallest latency that `part` of a hundred requests do not exceed.
        let rank = (self.0.len() * part).div_ceil(100).max(1);
        self.0.get(rank - 1).copied().unwrap_or_default()
    }

    pub(super) fn median(&self) -> Duration {
        self.of_hundred(50)
    }

    pub(super) fn p99(&self) -> Duration {
        self.of_hundred(99)
    }

    pub(super) fn max(&self) -> Duration {
        self.of_hundred(100)
    }
}

impl Neighbours {
    pub(super) fn connect(socket: &Path) -> anyhow::Result<Self> {
        let mut writer_random = Random::default();
        writer_random.below(1);
        Ok(Self {
            clients: [
                (Client::connect(socket)?, Command::Read, Random::default()),
                (Client::connect(socket)?, Command::Write, writer_random),
            ],
        })
    }

    /// Runs `action` while both clients send requests. Returns their latencies, the reader's first.
    pub(super) fn beside<T>(
        &mut self,
        action: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<(T, [Latencies; 2])> {
        let stop = &AtomicBool::new(false);
        thread::scope(|scope| {
            let clients = self.clients.each_mut();
            let threads =
                clients.map(|(client, command, blocks)| scope.spawn(move || requests(client, *command, blocks, stop)));
            let result = {
                let _flag = Flag(stop);
                action()
            };
            let mut latencies: [Latencies; 2] = Default::default();
            for (latencies, thread) in latencies.iter_mut().zip(threads) {
                *latencies = thread.join().map_err(|_| anyhow!("a client panicked"))??;
            }
            result.map(|result| (result, latencies))
        })
    }
}

fn requests(
    client: &mut Client,
    command: Command,
    blocks: &mut Random,
    is_over: &AtomicBool,
) -> anyhow::Result<Latencies> {
    let data: &[u8] = match command {
        Command::Write => &[0xc3; BLOCK as usize],
        _ => &[],
    };
    let mut latencies = Vec::new();
    while latencies.is_empty() || !is_over.load(Ordering::Relaxed) {
        let at = blocks.below(client.size / BLOCK) * BLOCK;
        let started = Instant::now();
        client.request(command, at, BLOCK, data)?;
        latencies.push(started.elapsed());
        thread::sleep(PAUSE);
    }
    latencies.sort_unstable();
    Ok(Latencies(latencies))
}

//! One attempt: a server with a cache is killed, another program writes to the image, and the next server must serve
//! the image's current content.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use tempfile::TempDir;

use super::super::Random;
use super::super::cached::{CacheMode, CacheRetention, Holds};
use super::super::disk::Format;
use super::super::guest::LIMIT;
use super::super::process::killed_with_parent;
use super::super::server::Server;
use super::guest::{DISK, FILLED_BYTES, Guest, Load, Use, random_range};
use super::model::Model;
use super::store::{Place, Store, Way, tool};

/// Twice the disk's size, so that no line is evicted.
const CACHE: u64 = 2 * DISK;

/// Sizes of reads.
const BLOCKS: [u64; 3] = [4 << 10, 16 << 10, 64 << 10];

const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Larder's error while the killed server's last I/O has not ended.
const IN_USE: &str = "in use by another process";
/// Larder's log text when it uses the cache's lines at once.
const BELIEVED: &str = "nothing else has written to the disk since";
/// Larder's log text when it compares each line with the disk first.
const CACHE_COMPARED_TEXT: &str = "each line is compared with it before it is used";
/// Larder's log text when it empties the cache.
const CACHE_EMPTIED_TEXT: &str = "it starts empty";
/// Larder's error when a dirty cache is stale.
const CHANGED: &str = "the disk was changed since without it";
/// Larder's error for a qcow2 image whose journal has uncommitted changes of the mapping, and which another program
/// has changed.
const STALE_JOURNAL_ERROR: &str = "the image has been changed since by another program";

/// Parameters of an attempt.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) number: u32,
    /// True for a control, in which no other program writes.
    pub(super) is_control: bool,
    pub(super) format: Format,
    pub(super) mode: CacheMode,
    pub(super) place: Place,
    /// Time from the kill to the other program's write.
    pub(super) delay: Duration,
    pub(super) load: Load,
    pub(super) seed: u64,
}

/// Reaction of the next server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// The server served the disk, and trusted the whole cache.
    Believed,
    /// The server served the disk, and compared the cache with it.
    Compared,
    /// The server served the disk, and emptied the cache.
    Anew,
    /// The server refused a disk whose cache is dirty.
    Refused,
    /// The server refused a qcow2 image with uncommitted journal changes, until these were discarded.
    JournalRefused,
}

/// Result of an attempt.
#[derive(Clone, Debug)]
pub(super) struct Done {
    pub(super) outcome: Outcome,
    /// Cache survival; only of controls.
    pub(super) warmth: CacheRetention,
    /// Most bytes seen that still had to be compared.
    pub(super) unproven: u64,
    /// Requests in flight at the kill.
    pub(super) in_flight: usize,
}

/// A running attempt.
struct Attempt<'a> {
    larder: &'a Path,
    plan: &'a Plan,
    folder: TempDir,
    sockets: TempDir,
    store: Store,
    model: Model,
    random: Random,
    warmth: CacheRetention,
    unproven: u64,
}

/// Carries out a plan, with the image in `folder`.
///
/// # Errors
/// A [`super::model::Mismatch`] if the disk's content is wrong, or another failure.
pub(super) fn run(larder: &Path, directory: &Path, plan: &Plan) -> anyhow::Result<Done> {
    let mut random = Random::new(plan.seed);
    let directory = tempfile::tempdir_in(directory).context("creating a directory for the image")?;
    let sockets = tempfile::tempdir_in("/dev/shm").context("creating a directory for sockets")?;
    let store = Store::make(plan.place, plan.format, DISK, directory.path(), sockets.path(), &mut random)?;
    let mut attempt = Attempt {
        larder,
        plan,
        folder: directory,
        sockets,
        store,
        model: Model::new(DISK),
        random,
        warmth: CacheRetention::default(),
        unproven: 0,
    };
    attempt.run()
}

impl Attempt<'_> {
    fn run(&mut self) -> anyhow::Result<Done> {
        let mut server = self.start().context("starting the first server")?;
        let mut guest = self.warm_up()?;
        let before = self.kill(&mut server, &mut guest)?;
        let in_flight = guest.drain(&mut self.model);
        drop(server);
        std::thread::sleep(self.plan.delay);
        let method = match self.plan.is_control {
            true => None,
            false => Some(self.write_foreign()?),
        };
        let outcome = self.check_next_server(before).with_context(|| format!("other program: {method:?}"))?;
        Ok(Done { outcome, warmth: std::mem::take(&mut self.warmth), unproven: self.unproven, in_flight })
    }

    fn cache(&self) -> PathBuf {
        self.folder.path().join("cache")
    }

    fn control(&self) -> PathBuf {
        self.sockets.path().join("c")
    }

    fn socket(&self) -> PathBuf {
        self.sockets.path().join("n")
    }

    /// Makes a command keep the disk's state files in directories of this attempt.
    fn with_state_directories<'c>(&self, command: &'c mut Command) -> &'c mut Command {
        command.env("STATE_DIRECTORY", self.folder.path().join("state")).env("RUNTIME_DIRECTORY", self.sockets.path())
    }

    /// Starts a server, always with the same arguments.
    fn start(&self) -> anyhow::Result<Server> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let program = self.larder.to_str().context("the program's path is not UTF-8")?;
            let mut command = killed_with_parent(program);
            command.args(["disk", "serve", self.store.address(), "--format"]);
            command.arg(match self.plan.format {
                Format::Raw => "raw",
                Format::Qcow2 => "qcow2",
            });
            command.arg("--nbd");
            command.arg(format!("nbd+unix:///?socket={}", self.socket().display()));
            command.arg("--control").arg(self.control());
            command.arg("--cache").arg(self.cache());
            command.args(["--cache-size", &CACHE.to_string()]);
            command.args(["--cache-mode", self.plan.mode.word(), "--prefetch", "off"]);
            self.with_state_directories(&mut command);
            match Server::from_command(command, &self.socket()) {
                Err(error) if error.to_string().contains(IN_USE) && Instant::now() < deadline => {}
                started => return started,
            }
        }
    }

    /// Runs `larder disk` with these arguments.
    fn run_larder_disk(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let mut command = Command::new(self.larder);
        command.arg("disk").args(arguments);
        tool(self.with_state_directories(&mut command))
    }

    /// Runs `larder disk cache` for the cache that the server uses.
    fn cache_command(&self, name: &str, more: &[&str]) -> anyhow::Result<()> {
        let (cache, control) = (self.cache(), self.control());
        let path = |path: &Path| path.display().to_string();
        let (cache, control) = (path(&cache), path(&control));
        let arguments = [&["cache", name, &cache][..], more, &["--control", &control]].concat();
        self.run_larder_disk(&arguments).map(drop)
    }

    fn set_mode(&self, mode: CacheMode) -> anyhow::Result<()> {
        self.cache_command("mode", &[mode.word()])
    }

    fn holds(&self) -> anyhow::Result<Holds> {
        Holds::ask(&self.control())
    }

    /// Waits until the cache is in a state.
    fn wait_until(&self, what: &str, condition: impl Fn(&Holds) -> bool) -> anyhow::Result<Holds> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let stats = self.holds()?;
            if condition(&stats) {
                return Ok(stats);
            }
            ensure!(Instant::now() < deadline, "still not true after {LIMIT:?}: {what}; {stats:?}");
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Fills the disk, and warms the cache until it holds all written data, clean.
    fn warm_up(&mut self) -> anyhow::Result<Guest> {
        let mut guest = Guest::connect(&self.socket())?;
        guest.fill(&mut self.model)?;
        match self.plan.mode {
            // Pass-through does not fill the cache.
            CacheMode::Pt => self.set_mode(CacheMode::Wt)?,
            CacheMode::Wb => self.cache_command("flush", &[])?,
            CacheMode::Wt | CacheMode::Wa => {}
        }
        let deadline = Instant::now() + LIMIT;
        while self.holds()?.cached_bytes < FILLED_BYTES {
            ensure!(Instant::now() < deadline, "the cache does not hold all written data");
            guest.read_all(BLOCKS[0], &mut self.model, &mut self.random)?;
        }
        self.wait_until("all lines are clean and checkpointed", |holds| {
            holds.uncheckpointed_bytes == 0 && holds.dirty_bytes == 0
        })?;
        if self.plan.mode == CacheMode::Pt {
            self.set_mode(CacheMode::Pt)?;
        }
        Ok(guest)
    }

    /// Runs the guest's load, and kills the server. Returns the cache's statistics from just before.
    fn kill(&mut self, server: &mut Server, guest: &mut Guest) -> anyhow::Result<Holds> {
        let (model, random) = (&mut self.model, &mut self.random);
        // With write-back these writes are dirty.
        for _ in 0..4 + random.below(8) {
            guest.write(random_range(Use::Written, random), model)?;
        }
        let before = match self.plan.load {
            Load::Idle => {
                let pauses_ms = [0, 10, 30, 300, 2500];
                let pause_ms = pauses_ms[random.below(pauses_ms.len() as u64) as usize];
                std::thread::sleep(Duration::from_millis(pause_ms));
                self.holds()?
            }
            load => {
                let end = Instant::now() + Duration::from_millis(random.below(150));
                while Instant::now() < end {
                    guest.submit(load, model, random)?;
                    guest.receive_one(model)?;
                }
                let before = Holds::ask(&self.sockets.path().join("c"))?;
                guest.submit(load, model, random)?;
                if random.below(2) == 0 {
                    std::thread::sleep(Duration::from_micros(random.below(200)));
                }
                before
            }
        };
        server.process.kill();
        Ok(before)
    }

    /// Lets another program write to data that is clean in the cache, or that the guest has never written.
    fn write_foreign(&mut self) -> anyhow::Result<Way> {
        let way = Way::any(self.plan.place, self.plan.format, &mut self.random);
        let mut pieces = Vec::new();
        for _ in 0..1 + self.random.below(3) {
            let range = random_range(Use::Foreign, &mut self.random);
            let (version, bytes) = self.model.new_version(&range);
            self.model.write_foreign(&range, version);
            pieces.push((range, bytes));
        }
        let written = self.store.write_foreign(way, &pieces, &mut self.random);
        written.with_context(|| format!("{way:?}"))?;
        Ok(way)
    }

    /// Starts the next server, and checks the data that it serves, or that its refusal is justified.
    fn check_next_server(&mut self, before: Holds) -> anyhow::Result<Outcome> {
        let image = self.store.bytes()?;
        let server = match self.start() {
            Ok(server) => server,
            Err(error) => {
                ensure!(!self.plan.is_control, "the disk is not served: {error:#}");
                ensure!(self.store.bytes()? == image, "a server that refused the image has changed it: {error:#}");
                let text = format!("{error:#}");
                let is_dirty = self.plan.mode == CacheMode::Wb && before.dirty_bytes > 0;
                if is_dirty && text.contains(CHANGED) {
                    return Ok(Outcome::Refused);
                }
                let has_journal = self.plan.format == Format::Qcow2 && self.plan.load == Load::Discards;
                if has_journal && text.contains(STALE_JOURNAL_ERROR) {
                    // An image with a dirty cache can be opened only after `drop --lose-dirty`.
                    if !is_dirty {
                        self.check_without_journal()?;
                    }
                    return Ok(Outcome::JournalRefused);
                }
                return Err(error.context("the disk is not served"));
            }
        };
        self.compare(server, before)
    }

    /// Discards the journal of a killed server, and serves the image as it is.
    fn check_without_journal(&mut self) -> anyhow::Result<()> {
        let mut command = Command::new(self.larder);
        command.args(["disk", "check", "--discard-journal", self.store.address()]);
        command.args(["--format", "qcow2"]);
        let output = self.with_state_directories(&mut command).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        // Exit code 1: there are leaks, or errors.
        let image_is_valid = text.contains("found: 0 errors") || output.status.success();
        ensure!(matches!(output.status.code(), Some(0 | 1)) && image_is_valid, "{command:?}: {text}");
        let server = self.start().context("starting the server without a journal")?;
        self.compare(server, Holds::default()).map(drop)
    }

    /// Reads the whole disk several times, and the image itself once the server has ended.
    fn compare(&mut self, mut server: Server, before: Holds) -> anyhow::Result<Outcome> {
        let stats = self.holds()?;
        let output = server.process.output();
        let outcome = match (
            output.contains(CACHE_EMPTIED_TEXT),
            output.contains(CACHE_COMPARED_TEXT),
            output.contains(BELIEVED),
        ) {
            (true, false, false) => Outcome::Anew,
            (false, true, false) => Outcome::Compared,
            (false, false, true) => Outcome::Believed,
            _ => bail!("the server does not log how it treats its cache: {output}"),
        };
        self.unproven = stats.unproven;
        if self.plan.is_control {
            let after = Holds::loaded(&self.control(), before)?;
            self.unproven = self.unproven.max(after.unproven);
            let after = self.wait_until("all lines are compared", |holds| holds.unproven == 0)?;
            self.warmth.killed(before, after);
        }
        let compared = self.read_repeatedly();
        compared.with_context(|| format!("the server's output: {}", server.process.output()))?;
        let code = server.ask_to_end()?;
        ensure!(code == Some(0), "the server exited with {code:?}: {}", server.process.output());
        let contents = self.store.contents()?;
        let compared = self.model.check(0, &contents);
        compared.context("checking the image after the server's exit")?;
        Ok(outcome)
    }

    fn read_repeatedly(&mut self) -> anyhow::Result<()> {
        let mut guest = Guest::connect(&self.socket())?;
        let bypasses_cache = self.plan.mode == CacheMode::Pt;
        let uses_cache_at_once = self.random.below(2) == 0;
        if bypasses_cache && uses_cache_at_once {
            self.set_mode(CacheMode::Wt)?;
        }
        let (model, random) = (&mut self.model, &mut self.random);
        if random.below(2) == 0 {
            // Writes to parts of lines that may be stale.
            for _ in 0..4 {
                guest.write(random_range(Use::Foreign, random), model)?;
            }
        }
        for context in ["first read", "second read"] {
            let block = BLOCKS[random.below(BLOCKS.len() as u64) as usize];
            guest.read_all(block, model, random).context(context)?;
        }
        let holds = self.holds()?;
        self.unproven = self.unproven.max(holds.unproven);
        self.wait_until("all lines are compared", |holds| holds.unproven == 0)?;
        if bypasses_cache && !uses_cache_at_once {
            self.set_mode(CacheMode::Wt)?;
        }
        let (model, random) = (&mut self.model, &mut self.random);
        for block in BLOCKS {
            guest.read_all(block, model, random).context("reading after all lines were compared")?;
        }
        Ok(())
    }
}

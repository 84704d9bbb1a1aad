//! One try: a disk with a cache is served, its server is killed, another program writes to the image, and the next server must
//! serve what is there now.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use tempfile::TempDir;

use super::super::Random;
use super::super::cached::{CacheMode, Holds, Warmth};
use super::super::disk::Format;
use super::super::guest::LIMIT;
use super::super::process::mortal;
use super::super::server::Server;
use super::guest::{DISK, FILLED, Guest, Load, Use, any_range};
use super::model::Model;
use super::store::{Place, Store, Way, tool};

/// Twice what the disk has: no line leaves.
const CACHE: u64 = 2 * DISK;

/// Sizes of reads.
const BLOCKS: [u64; 3] = [4 << 10, 16 << 10, 64 << 10];

const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// What Larder says while the killed server's last I/O has not ended.
const IN_USE: &str = "in use by another process";
/// What it says of a cache whose lines it uses at once.
const BELIEVED: &str = "nothing else has written to the disk since";
/// What it says of a cache whose lines it compares.
const COMPARED: &str = "each line is compared with it before it is used";
/// What it says of a cache that it empties.
const ANEW: &str = "it begins anew, empty";
/// Why it does not serve a disk whose cache may have what the disk has not.
const CHANGED: &str = "the disk was changed since without it";
/// Why it does not serve a qcow2 image with uncommitted changes of the mapping.
const OVERTAKEN: &str = "the image has been changed since by another program";

/// What is tried.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) number: u32,
    /// No other program writes.
    pub(super) is_control: bool,
    pub(super) format: Format,
    pub(super) mode: CacheMode,
    pub(super) place: Place,
    /// From the kill to the other program's write.
    pub(super) delay: Duration,
    pub(super) load: Load,
    pub(super) seed: u64,
}

/// What the next server has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// It served the disk, and used all that the cache has.
    Believed,
    /// It served the disk, and compared the cache with it.
    Compared,
    /// It served the disk, and emptied the cache.
    Anew,
    /// It did not serve a disk whose cache has what the disk has not.
    Refused,
    /// It did not serve a qcow2 image with uncommitted changes, until those were given up.
    JournalRefused,
}

/// What came of a try.
#[derive(Clone, Debug)]
pub(super) struct Done {
    pub(super) outcome: Outcome,
    /// Of a control.
    pub(super) warmth: Warmth,
    /// The most bytes that were to be compared.
    pub(super) unproven: u64,
    /// Requests that were in flight when the server was killed.
    pub(super) in_flight: usize,
}

/// A try that is under way.
struct Attempt<'a> {
    larder: &'a Path,
    plan: &'a Plan,
    folder: TempDir,
    sockets: TempDir,
    store: Store,
    model: Model,
    random: Random,
    warmth: Warmth,
    unproven: u64,
}

/// Carries a plan out, with the image in `folder`.
///
/// # Errors
/// A [`super::model::Mismatch`], or something else that must not be.
pub(super) fn run(larder: &Path, folder: &Path, plan: &Plan) -> anyhow::Result<Done> {
    let mut random = Random::new(plan.seed);
    let folder = tempfile::tempdir_in(folder).context("a folder for the image")?;
    let sockets = tempfile::tempdir_in("/dev/shm").context("a folder for sockets")?;
    let store = Store::make(
        plan.place,
        plan.format,
        DISK,
        folder.path(),
        sockets.path(),
        &mut random,
    )?;
    let mut attempt = Attempt {
        larder,
        plan,
        folder,
        sockets,
        store,
        model: Model::new(DISK),
        random,
        warmth: Warmth::default(),
        unproven: 0,
    };
    attempt.run()
}

impl Attempt<'_> {
    fn run(&mut self) -> anyhow::Result<Done> {
        let mut server = self.start().context("the first server")?;
        let mut guest = self.warm_up()?;
        let before = self.kill(&mut server, &mut guest)?;
        let in_flight = guest.drain(&mut self.model);
        drop(server);
        std::thread::sleep(self.plan.delay);
        let way = match self.plan.is_control {
            true => None,
            false => Some(self.write_foreign()?),
        };
        let outcome = self
            .serve_again(before)
            .with_context(|| format!("other program: {way:?}"))?;
        Ok(Done {
            outcome,
            warmth: std::mem::take(&mut self.warmth),
            unproven: self.unproven,
            in_flight,
        })
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

    /// Has a command use folders of this try for what is noted of its disk.
    fn with_folders<'c>(&self, command: &'c mut Command) -> &'c mut Command {
        command
            .env("STATE_DIRECTORY", self.folder.path().join("state"))
            .env("RUNTIME_DIRECTORY", self.sockets.path())
    }

    /// Starts a server, always with the same words.
    fn start(&self) -> anyhow::Result<Server> {
        let give_up = Instant::now() + LIMIT;
        loop {
            let program = self.larder.to_str().context("the program's path is no UTF-8")?;
            let mut command = mortal(program);
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
            self.with_folders(&mut command);
            match Server::from_command(command, &self.socket()) {
                Err(error) if error.to_string().contains(IN_USE) && Instant::now() < give_up => {}
                started => return started,
            }
        }
    }

    /// Runs `larder disk`.
    fn larder_disk(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let mut command = Command::new(self.larder);
        command.arg("disk").args(arguments);
        tool(self.with_folders(&mut command))
    }

    /// Runs `larder disk cache` for the cache that the server uses.
    fn cache_command(&self, name: &str, more: &[&str]) -> anyhow::Result<()> {
        let (cache, control) = (self.cache(), self.control());
        let path = |path: &Path| path.display().to_string();
        let (cache, control) = (path(&cache), path(&control));
        let arguments = [&["cache", name, &cache][..], more, &["--control", &control]].concat();
        self.larder_disk(&arguments).map(drop)
    }

    fn set_mode(&self, mode: CacheMode) -> anyhow::Result<()> {
        self.cache_command("mode", &[mode.word()])
    }

    fn holds(&self) -> anyhow::Result<Holds> {
        Holds::ask(&self.control())
    }

    /// Waits until the cache is in a state.
    fn wait_until(&self, what: &str, is_so: impl Fn(&Holds) -> bool) -> anyhow::Result<Holds> {
        let give_up = Instant::now() + LIMIT;
        loop {
            let holds = self.holds()?;
            if is_so(&holds) {
                return Ok(holds);
            }
            ensure!(Instant::now() < give_up, "not within {LIMIT:?}: {what}; {holds:?}");
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Fills the disk, and has the cache hold all of that, clean.
    fn warm_up(&mut self) -> anyhow::Result<Guest> {
        let mut guest = Guest::connect(&self.socket())?;
        guest.fill(&mut self.model)?;
        match self.plan.mode {
            // It brings nothing in.
            CacheMode::Pt => self.set_mode(CacheMode::Wt)?,
            CacheMode::Wb => self.cache_command("flush", &[])?,
            CacheMode::Wt | CacheMode::Wa => {}
        }
        let give_up = Instant::now() + LIMIT;
        while self.holds()?.bytes < FILLED {
            ensure!(Instant::now() < give_up, "the cache does not hold all");
            guest.read_all(BLOCKS[0], &mut self.model, &mut self.random)?;
        }
        self.wait_until("all is settled", |holds| holds.unsettled == 0 && holds.dirty == 0)?;
        if self.plan.mode == CacheMode::Pt {
            self.set_mode(CacheMode::Pt)?;
        }
        Ok(guest)
    }

    /// The guest works, and the server is killed; what the cache had a moment before.
    fn kill(&mut self, server: &mut Server, guest: &mut Guest) -> anyhow::Result<Holds> {
        let (model, random) = (&mut self.model, &mut self.random);
        // In write-back these are dirty.
        for _ in 0..4 + random.below(8) {
            guest.write(any_range(Use::Written, random), model)?;
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

    /// Another program writes to what the cache holds clean, or to what the guest never wrote to.
    fn write_foreign(&mut self) -> anyhow::Result<Way> {
        let way = Way::any(self.plan.place, self.plan.format, &mut self.random);
        let mut pieces = Vec::new();
        for _ in 0..1 + self.random.below(3) {
            let range = any_range(Use::Foreign, &mut self.random);
            let (version, bytes) = self.model.new_version(&range);
            self.model.write_foreign(&range, version);
            pieces.push((range, bytes));
        }
        let written = self.store.write_foreign(way, &pieces, &mut self.random);
        written.with_context(|| format!("{way:?}"))?;
        Ok(way)
    }

    /// Starts the next server, and compares what it serves; or it must be right that it serves nothing.
    fn serve_again(&mut self, before: Holds) -> anyhow::Result<Outcome> {
        let image = self.store.bytes()?;
        let server = match self.start() {
            Ok(server) => server,
            Err(error) => {
                ensure!(!self.plan.is_control, "it is not served: {error:#}");
                ensure!(
                    self.store.bytes()? == image,
                    "the image was changed by a server that said: {error:#}"
                );
                let said = format!("{error:#}");
                let is_dirty = self.plan.mode == CacheMode::Wb && before.dirty > 0;
                if is_dirty && said.contains(CHANGED) {
                    return Ok(Outcome::Refused);
                }
                let has_journal = self.plan.format == Format::Qcow2 && self.plan.load == Load::Discards;
                if has_journal && said.contains(OVERTAKEN) {
                    // Nothing but `drop --lose-dirty` opens an image whose cache has what it has not.
                    if !is_dirty {
                        self.serve_without_journal()?;
                    }
                    return Ok(Outcome::JournalRefused);
                }
                return Err(error.context("it is not served"));
            }
        };
        self.compare(server, before)
    }

    /// Gives up what a killed server has noted of the image's mapping, and serves what is there.
    fn serve_without_journal(&mut self) -> anyhow::Result<()> {
        let mut command = Command::new(self.larder);
        command.args(["disk", "check", "--discard-journal", self.store.address()]);
        command.args(["--format", "qcow2"]);
        let output = self.with_folders(&mut command).output()?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        // 1: there are leaks, or errors.
        let is_sound = said.contains("found: 0 errors") || output.status.success();
        ensure!(
            matches!(output.status.code(), Some(0 | 1)) && is_sound,
            "{command:?}: {said}"
        );
        let server = self.start().context("the server without a journal")?;
        self.compare(server, Holds::default()).map(drop)
    }

    /// Reads all of the disk several times, and the image itself once the server has ended.
    fn compare(&mut self, mut server: Server, before: Holds) -> anyhow::Result<Outcome> {
        let at_first = self.holds()?;
        let said = server.process.output();
        let outcome = match (said.contains(ANEW), said.contains(COMPARED), said.contains(BELIEVED)) {
            (true, false, false) => Outcome::Anew,
            (false, true, false) => Outcome::Compared,
            (false, false, true) => Outcome::Believed,
            _ => bail!("it does not say what becomes of its cache: {said}"),
        };
        self.unproven = at_first.unproven;
        if self.plan.is_control {
            let after = Holds::loaded(&self.control(), before)?;
            self.unproven = self.unproven.max(after.unproven);
            let after = self.wait_until("all is compared", |holds| holds.unproven == 0)?;
            self.warmth.killed(before, after);
        }
        let compared = self.read_several_times();
        compared.with_context(|| format!("the server said: {}", server.process.output()))?;
        let code = server.ask_to_end()?;
        ensure!(code == Some(0), "it ended with {code:?}: {}", server.process.output());
        let contents = self.store.contents()?;
        let compared = self.model.check(0, &contents);
        compared.context("the image after the server's end")?;
        Ok(outcome)
    }

    fn read_several_times(&mut self) -> anyhow::Result<()> {
        let mut guest = Guest::connect(&self.socket())?;
        let is_passed_by = self.plan.mode == CacheMode::Pt;
        let uses_cache_at_once = self.random.below(2) == 0;
        if is_passed_by && uses_cache_at_once {
            self.set_mode(CacheMode::Wt)?;
        }
        let (model, random) = (&mut self.model, &mut self.random);
        if random.below(2) == 0 {
            // A part of a line that may be stale.
            for _ in 0..4 {
                guest.write(any_range(Use::Foreign, random), model)?;
            }
        }
        for when in ["at once", "again"] {
            let block = BLOCKS[random.below(BLOCKS.len() as u64) as usize];
            guest.read_all(block, model, random).context(when)?;
        }
        let holds = self.holds()?;
        self.unproven = self.unproven.max(holds.unproven);
        self.wait_until("all is compared", |holds| holds.unproven == 0)?;
        if is_passed_by && !uses_cache_at_once {
            self.set_mode(CacheMode::Wt)?;
        }
        let (model, random) = (&mut self.model, &mut self.random);
        for block in BLOCKS {
            guest.read_all(block, model, random).context("when all was compared")?;
        }
        Ok(())
    }
}

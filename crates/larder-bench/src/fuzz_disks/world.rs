//! Carries out the steps of a case, and compares the results of Larder and QEMU with the model.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use larder_block::boot::is_tmpfs;

use super::build::{self, BuiltImage};
use super::fault::Fault;
use super::flight::Flight;
use super::guest::Guest;
use super::live::{Paths, RunningServer, last_lines};
use super::model::Model;
use super::nbd;
use super::shape::{Compression, DataFile, Shape};
use super::steps::{Kind, QemuStep, Request, Serve, Step};
use super::tools::{contents, qemu, run, run_qemu_tool_ok};
use crate::campaign::cached::CacheMode;

/// Maximum number of requests in flight.
const DEPTH: usize = 16;
/// Time within which a killed server's I/O must end.
const LOCK_RELEASE_TIMEOUT: Duration = Duration::from_secs(120);

/// A running case.
pub(super) struct World<'a> {
    larder: &'a Path,
    folder: &'a Path,
    shape: Shape,
    seed: u64,
    built: BuiltImage,
    model: Model,
    paths: Paths,
    serve: Serve,
    live: Option<RunningServer>,
    flight: Flight,
    /// The guest of a killed server, for the next one.
    orphan: Option<Guest>,
    /// True if the image lacks data until it is served for writing, because of a killed server's journal or a killed
    /// QEMU's refcounts.
    needs_server: bool,
    /// True if a server was killed, so that leaks are allowed.
    was_killed: bool,
    /// True if the cache may have writes that the image lacks.
    is_cache_dirty: bool,
    /// True if the images are on tmpfs.
    is_in_memory: bool,
    /// Events that occurred, counted as features.
    pub(super) events: BTreeSet<&'static str>,
    pub(super) requests: u64,
}

impl<'a> World<'a> {
    pub(super) fn new(larder: &'a Path, directory: &'a Path, shape: &Shape, seed: u64) -> Result<Self, Fault> {
        let built = build::build(shape, seed, directory)?;
        let mut world = Self {
            larder,
            folder: directory,
            shape: shape.clone(),
            seed,
            model: Model::new(built.bytes.clone()),
            paths: Paths::new(directory, &built.files.image),
            built,
            serve: Serve::default(),
            live: None,
            flight: Flight::default(),
            orphan: None,
            needs_server: shape.dirty,
            was_killed: false,
            is_cache_dirty: false,
            is_in_memory: is_tmpfs(&rustix::fs::statfs(directory).map_err(std::io::Error::from)?),
            events: BTreeSet::new(),
            requests: 0,
        };
        if shape.corrupt {
            world.check_and_repair_corrupt()?;
        }
        if let Some((cluster, at)) = world.built.flagged {
            world.check_reserved_flag_read(cluster)?;
            build::clear_zero_flag(&world.built.files.image, at)?;
        }
        Ok(world)
    }

    /// Carries out one step.
    pub(super) fn step(&mut self, step: &Step) -> Result<(), Fault> {
        match step {
            Step::Request(request) => self.request(request),
            Step::Serve(serve) => {
                self.stop()?;
                self.serve = serve.clone();
                Ok(())
            }
            Step::Kill { compare } => self.kill(*compare),
            Step::Stop => {
                self.stop()?;
                self.check_stopped_image().map(drop)
            }
            Step::ReadAll => self.read_all(),
            Step::Grow(by) => self.grow(*by),
            Step::Qemu(steps) => self.qemu(steps),
            Step::Snapshot => self.snapshot(),
        }
    }

    /// Stops everything, and makes the final comparison.
    pub(super) fn end(&mut self) -> Result<(), Fault> {
        self.read_all()?;
        self.stop()?;
        self.rest()?;
        let code = self.check_stopped_image()?;
        self.check_other_files(code)
    }

    fn live(&mut self) -> Result<&mut RunningServer, Fault> {
        if self.live.is_none() {
            self.start()?;
        }
        Ok(self.live.as_mut().expect("just started"))
    }

    fn start(&mut self) -> Result<(), Fault> {
        let mut serve = self.serve.clone();
        if self.is_cache_dirty && serve.cache.is_none() {
            self.flush_cache()?;
        }
        // Read-only service is impossible with a dirty cache, or for a guest's driver that still writes.
        serve.read_only &= self.orphan.is_none() && !self.is_cache_dirty && serve.cache.is_none();
        if let Some(mode) = serve.cache {
            self.is_cache_dirty |= mode == CacheMode::Wb;
            self.model.set_write_back(self.is_cache_dirty);
            self.events.insert(match mode {
                CacheMode::Wt => "cache wt",
                CacheMode::Wb => "cache wb",
                CacheMode::Wa => "cache wa",
                CacheMode::Pt => "cache pt",
            });
        }
        self.model.set_torn_reads(self.is_in_memory || serve.buffered);
        let started = RunningServer::start(self.larder, &self.paths, &self.shape, &serve, self.seed)?;
        let live = started
            .map_err(|output| Fault::new("refused", format!("the disk is not served: {}", last_lines(&output))))?;
        if serve.read_only {
            self.events.insert("read-only");
        } else if self.needs_server && self.was_killed {
            self.events.insert("next server after kill");
        }
        self.needs_server &= serve.read_only;
        self.live = Some(live);
        match self.orphan.take() {
            Some(guest) if self.flight.has_guest_requests() || self.seed.is_multiple_of(2) => {
                let live = self.live.as_mut().expect("just started");
                live.adopt(guest)?;
                self.events.insert("guest reconnects");
                self.settle()
            }
            _ => Ok(()),
        }
    }

    fn request(&mut self, request: &Request) -> Result<(), Fault> {
        let mut request = request.clone();
        self.live()?;
        if !self.fit(&mut request)? {
            return Ok(());
        }
        let len = request.range.end - request.range.start;
        let live = self.live.as_mut().expect("started above");
        let has_no_room = !request.nbd && !live.guest()?.has_room(len);
        if self.flight.len() >= DEPTH || has_no_room || self.flight.conflicts(&request) {
            self.settle()?;
        }
        let live = self.live.as_mut().expect("started above");
        self.flight.send(live, &request)?;
        self.events.insert(if request.nbd { "NBD" } else { "vhost-user" });
        self.requests += 1;
        if !request.later {
            self.settle()?;
        }
        Ok(())
    }

    /// Adjusts a request to the disk's present state. Returns whether it is possible.
    fn fit(&mut self, request: &mut Request) -> Result<bool, Fault> {
        let size = self.model.size();
        let live = self.live.as_mut().expect("started before");
        if live.serve.read_only && (request.changes() || request.kind == Kind::Flush) {
            return Ok(false);
        }
        // A driver knows only the features that the server offered; vhost-user-blk addresses whole sectors.
        let unit = if request.nbd { u64::from(live.nbd()?.block_min) } else { 512 };
        let range = &mut request.range;
        *range = range.start / unit * unit..range.end.div_ceil(unit) * unit;
        range.end = range.end.min(size);
        let is_empty = range.start >= range.end;
        if is_empty && !matches!(request.kind, Kind::Flush) {
            return Ok(false);
        }
        if request.kind == Kind::Flush {
            *range = 0..0;
        }
        request.fua &= request.nbd;
        Ok(true)
    }

    /// Waits for all answers and checks them.
    fn settle(&mut self) -> Result<(), Fault> {
        let Some(live) = self.live.as_mut() else { return Ok(()) };
        self.flight.settle(live, &mut self.model)
    }

    fn read_all(&mut self) -> Result<(), Fault> {
        self.settle()?;
        let size = self.model.size();
        let nbd = self.seed & 1 == 0;
        let served_bytes = match nbd {
            true => self.live()?.nbd()?.size,
            false => self.live()?.guest()?.capacity()?,
        };
        if served_bytes != size {
            return Err(Fault::new("size", format!("the disk is served with {served_bytes} bytes, not {size}")));
        }
        let mut at = 0;
        while at < size {
            let end = (at + (2 << 20)).min(size);
            let request = Request { kind: Kind::Read, range: at..end, fua: false, nbd, later: true };
            self.request(&request)?;
            at = end;
        }
        self.settle()
    }

    fn kill(&mut self, compare: bool) -> Result<(), Fault> {
        let Some(live) = self.live.take() else { return Ok(()) };
        self.events.insert("kill");
        self.events.extend((!self.flight.is_empty()).then_some("kill in flight"));
        let is_writable = !live.serve.read_only;
        let is_write_back = self.is_cache_dirty;
        self.orphan = live.kill()?;
        self.needs_server |= is_writable;
        self.was_killed |= is_writable;
        self.flight.interrupt(&mut self.model);
        // A dirty image that was only read is still dirty.
        let is_dirty = self.shape.dirty && !self.was_killed;
        if compare && !is_write_back && !is_dirty {
            self.wait_for_locks()?;
            self.check("after a kill")?;
            let bytes = contents(&self.paths.image, "qcow2", None, self.folder)?;
            let result = self.model.check_after_crash(&bytes);
            result.map_err(|what| Fault::new("lost", format!("read by QEMU after a kill: {what}")))?;
            self.events.insert("QEMU after kill");
        }
        Ok(())
    }

    /// Waits until the kernel has released a killed server's locks, which it does when the server's last I/O has
    /// ended. `qemu-img check` needs more of the locks than other commands, and those of the data file too.
    fn wait_for_locks(&self) -> Result<(), Fault> {
        let image = self.paths.image.to_string_lossy();
        let deadline = Instant::now() + LOCK_RELEASE_TIMEOUT;
        loop {
            let (_, output) = qemu("qemu-img", &["check", "-q", "-f", "qcow2", &image])?;
            if !output.contains("Failed to get") {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(Fault::new(
                    "locks",
                    format!("a killed server's locks are not released: {}", last_lines(&output)),
                ));
            }
        }
    }

    fn stop(&mut self) -> Result<(), Fault> {
        self.settle()?;
        let Some(live) = self.live.take() else { return Ok(()) };
        let (code, output) = live.stop()?;
        if !self.needs_server {
            self.model.flushed();
        }
        match code {
            Some(0) => Ok(()),
            code => Err(Fault::new("exit", format!("the server exited with {code:?}: {}", last_lines(&output)))),
        }
    }

    /// Completes the image, so that no data is left in a journal or in a cache.
    fn rest(&mut self) -> Result<(), Fault> {
        self.stop()?;
        if self.needs_server || self.flight.has_guest_requests() {
            self.serve.read_only = false;
            self.live()?;
            self.stop()?;
        }
        self.orphan = None;
        self.flush_cache()
    }

    fn flush_cache(&mut self) -> Result<(), Fault> {
        if !self.is_cache_dirty {
            return Ok(());
        }
        let cache = self.paths.cache.to_string_lossy().into_owned();
        let command = match self.shape.device {
            // The flush command connects to the disk by its URI, where no server listens now.
            true => return self.flush_cache_by_serving(),
            false => self.paths.command(self.larder, &["disk", "cache", "flush", "--trust-image", &cache]),
        };
        let (code, output) = run(command)?;
        if code != Some(0) {
            return Err(Fault::new(
                "cache",
                format!("larder disk cache flush exited with {code:?}: {}", last_lines(&output)),
            ));
        }
        self.events.insert("cache flush");
        self.is_cache_dirty = false;
        self.needs_server = false;
        self.model.set_write_back(false);
        Ok(())
    }

    /// Flushes the cache with a write-through server, which writes all dirty data to the disk by its end.
    fn flush_cache_by_serving(&mut self) -> Result<(), Fault> {
        self.serve.cache = Some(CacheMode::Wt);
        self.is_cache_dirty = false;
        self.serve.read_only = false;
        self.start()?;
        self.stop()?;
        self.model.set_write_back(false);
        Ok(())
    }

    /// Checks that `qemu-img check` finds nothing, or only leaks after a kill.
    fn check(&mut self, when: &str) -> Result<i32, Fault> {
        let image = self.paths.image.to_string_lossy().into_owned();
        let (code, output) = qemu("qemu-img", &["check", "-f", "qcow2", &image])?;
        match code {
            Some(0) => Ok(0),
            // A program that does not maintain bitmaps invalidates them by clearing a bit; then they are leaks.
            Some(3) if self.was_killed || self.shape.bitmap => {
                self.events.insert("leaks");
                Ok(3)
            }
            code => {
                let lines: Vec<&str> = output.lines().take(6).collect();
                Err(Fault::new("check", format!("qemu-img check {when} exited with {code:?}: {}", lines.join(" | "))))
            }
        }
    }

    /// Compares an image without a server. Returns the exit code of `qemu-img check`.
    fn check_stopped_image(&mut self) -> Result<i32, Fault> {
        if self.needs_server || self.is_cache_dirty || self.flight.has_guest_requests() {
            return Ok(0);
        }
        let code = self.check("without a server")?;
        let bytes = contents(&self.paths.image, "qcow2", None, self.folder)?;
        let result = self.model.check(&bytes);
        result.map_err(|what| Fault::new("content", format!("read by QEMU: {what}")))?;
        Ok(code)
    }

    /// Compares backing files, snapshots and a raw data file, and the results of both checks.
    fn check_other_files(&mut self, code: i32) -> Result<(), Fault> {
        for (path, bytes) in &self.built.files.backing {
            if &std::fs::read(path)? != bytes {
                return Err(Fault::new("backing", format!("{} has changed", path.display())));
            }
        }
        for (name, bytes) in &self.built.snapshots {
            let mut now = contents(&self.paths.image, "qcow2", Some(name), self.folder)?;
            // QEMU shows a snapshot with the disk's current size.
            now.truncate(bytes.len());
            if &now != bytes {
                return Err(Fault::new("snapshot", format!("snapshot {name} has changed")));
            }
        }
        if self.shape.data_file == DataFile::Raw {
            let mut bytes = std::fs::read(&self.built.files.data_file)?;
            bytes.resize(self.model.size() as usize, 0);
            let result = self.model.check(&bytes);
            result.map_err(|what| Fault::new("content", format!("the raw data file: {what}")))?;
        }
        self.check_plain_reads()?;
        self.compare_checks(code)
    }

    /// Compares QEMU's plain reads: unlike them, `convert` queries the block status first.
    fn check_plain_reads(&mut self) -> Result<(), Fault> {
        if !self.seed.is_multiple_of(3) {
            return Ok(());
        }
        let to = self.folder.join("read");
        let (image, out) = (format!("if={}", self.paths.image.display()), format!("of={}", to.display()));
        run_qemu_tool_ok("qemu-img", &["dd", "-f", "qcow2", "-O", "raw", "bs=64k", &image, &out])?;
        let mut bytes = std::fs::read(&to)?;
        std::fs::remove_file(&to)?;
        bytes.resize(self.model.size() as usize, 0);
        let result = self.model.check(&bytes);
        result.map_err(|what| Fault::new("content", format!("read by qemu-img dd: {what}")))
    }

    /// Compares Larder's check with QEMU's, and repairs leaks.
    fn compare_checks(&mut self, code: i32) -> Result<(), Fault> {
        if code == 0 && !self.seed.is_multiple_of(4) {
            return Ok(());
        }
        let image = self.paths.image.to_string_lossy().into_owned();
        let (larder_code, output) = run(self.paths.command(self.larder, &["disk", "check", "--trust-image", &image]))?;
        let agrees = match code {
            0 => larder_code == Some(0),
            _ => larder_code == Some(1) && output.contains("leak"),
        };
        if !agrees {
            let what = format!(
                "qemu-img check exited with {code}, larder disk check with {larder_code:?}: {}",
                last_lines(&output)
            );
            return Err(Fault::new("check differs", what));
        }
        if code != 0 {
            let (repaired, output) =
                run(self.paths.command(self.larder, &["disk", "check", "--repair=leaks", "--trust-image", &image]))?;
            self.was_killed = false;
            if repaired != Some(0) {
                return Err(Fault::new("repair", format!("larder exited with {repaired:?}: {}", last_lines(&output))));
            }
            self.check("after a repair")?;
            self.events.insert("leaks repaired");
        }
        Ok(())
    }

    fn grow(&mut self, by: u64) -> Result<(), Fault> {
        self.rest()?;
        if self.shape.device {
            return Ok(());
        }
        let size = self.model.size() + by;
        let image = self.paths.image.to_string_lossy().into_owned();
        let (code, output) =
            run(self.paths.command(self.larder, &["disk", "resize", "--trust-image", &image, &size.to_string()]))?;
        match code {
            Some(0) => {
                self.events.insert("resize");
                self.model.grow(by);
            }
            // Larder refuses to grow a disk with VM state, whose clusters would become part of the disk, or with
            // snapshots in version 2, where a snapshot has no size of its own.
            Some(_) if self.shape.vm_state || (self.shape.version == 2 && !self.built.snapshots.is_empty()) => {
                self.events.insert("resize refused");
            }
            code => {
                return Err(Fault::new("resize", format!("larder exited with {code:?}: {}", last_lines(&output))));
            }
        }
        self.check_stopped_image().map(drop)
    }

    /// Lets QEMU change the image between two servers.
    fn qemu(&mut self, steps: &[QemuStep]) -> Result<(), Fault> {
        self.rest()?;
        self.check_stopped_image()?;
        if self.shape.device {
            return Ok(());
        }
        let size = self.model.size();
        let fits = |step: &&QemuStep| match step {
            QemuStep::Write(_, range) | QemuStep::Zeroes(_, range) | QemuStep::Discard(range) => range.end <= size,
            QemuStep::Compressed(_, at) => *at < size && self.shape.compression != Compression::None,
        };
        let steps: Vec<QemuStep> = steps.iter().filter(fits).cloned().collect();
        build::apply(&self.shape, &self.paths.image, size, &steps)?;
        self.model = Model::new(contents(&self.paths.image, "qcow2", None, self.folder)?);
        self.events.insert("QEMU writes between servers");
        Ok(())
    }

    fn snapshot(&mut self) -> Result<(), Fault> {
        self.rest()?;
        let is_allowed = self.shape.data_file == DataFile::None && self.shape.refcount_bits >= 8;
        if self.shape.device || !is_allowed {
            return Ok(());
        }
        let name = format!("later{}", self.built.snapshots.len());
        let image = self.paths.image.to_string_lossy().into_owned();
        run_qemu_tool_ok("qemu-img", &["snapshot", "-c", &name, &image])?;
        let bytes = contents(&self.paths.image, "qcow2", Some(&name), self.folder)?;
        self.built.snapshots.push((name, bytes));
        self.events.insert("snapshot between servers");
        self.check_stopped_image().map(drop)
    }

    /// Checks that an image marked as corrupt is not served for writing, and repairs it.
    fn check_and_repair_corrupt(&mut self) -> Result<(), Fault> {
        if RunningServer::start(self.larder, &self.paths, &self.shape, &Serve::default(), self.seed)?.is_ok() {
            return Err(Fault::new("corrupt", "an image that is marked as corrupt is served"));
        }
        let image = self.paths.image.to_string_lossy().into_owned();
        let (code, output) =
            run(self.paths.command(self.larder, &["disk", "check", "--repair", "--trust-image", &image]))?;
        match code {
            Some(0) => Ok(()),
            code => Err(Fault::new("repair", format!("larder exited with {code:?}: {}", last_lines(&output)))),
        }
    }

    /// Checks that a cluster whose entry has a flag unknown to its version gives an I/O error, as in QEMU, while the
    /// disk is served.
    fn check_reserved_flag_read(&mut self, cluster: u64) -> Result<(), Fault> {
        let started = RunningServer::start(self.larder, &self.paths, &self.shape, &Serve::default(), self.seed)?;
        let mut live = started
            .map_err(|output| Fault::new("refused", format!("the disk is not served: {}", last_lines(&output))))?;
        let at = cluster * self.shape.cluster_len();
        let range: Range<u64> = at..at + 512;
        let client = live.nbd()?;
        let sent = client.send(nbd::READ, 0, &range, &[]);
        let reply = sent.and_then(|_| client.receive());
        let reply = reply.map_err(|error| live.died("reading", &error.to_string()))?;
        let code = live.stop()?;
        if code.0 != Some(0) {
            return Err(Fault::new("exit", format!("the server exited with {:?}: {}", code.0, last_lines(&code.1))));
        }
        match reply.error {
            0 => Err(Fault::new(
                "zero flag",
                format!("version 2: the read of the cluster at {at:#x}, whose entry has the zero flag, did not fail"),
            )),
            _ => Ok(()),
        }
    }
}

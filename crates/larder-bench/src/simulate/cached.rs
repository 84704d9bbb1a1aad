//! The cache over another stack, on a disk of its own, so small that it is always full.

use std::cell::{Cell, RefCell};
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::time::Duration;

use larder_block::backend::simulated::{SeededRng, SimulatedDevice};
use larder_block::event_loop::WeakLoop;
use larder_block::filter::switch::LayerSwitch;
use larder_block::signal::first_of;
use larder_block::{
    BlockDevice, BoxFuture, ByteLen, ByteOffset, ByteRange, Extent, ExtentKind, Loop, ReadBuf, WriteBuf, WriteFlags,
};
use larder_cache::{
    Cache, CacheCreateOptions, CacheMode, CacheOpenOptions, CleanOptions, DiskId, FailureLog, FailureRecord,
    PersistOptions, Verdict, create,
};

use super::stack::{Disk, Opened, Outcome, SettingsChange, Stack};

/// The cache stack. Its last disk but one holds the cache. The last one is the failure log (`witness`), which records
/// that the cache must not be trusted, and never fails.
pub(super) struct Cached {
    pub(super) name: &'static str,
    pub(super) below: &'static dyn Stack,
    pub(super) modes: ModeMix,
    /// True if the cache is exchanged at run time for the same one, opened again.
    pub(super) is_replaced: bool,
}

/// Distribution of the cache mode, which changes at each opening and at run time.
#[derive(Clone, Copy)]
pub(super) struct ModeMix {
    /// Mode that is chosen in 70 % of the cases.
    pub(super) mostly: Option<CacheMode>,
    /// Modes among which the choice is random otherwise.
    pub(super) any_of: &'static [CacheMode],
}

impl ModeMix {
    /// All modes, equally likely.
    pub(super) const ANY: Self = Self {
        mostly: None,
        any_of: &[CacheMode::WriteThrough, CacheMode::WriteAround, CacheMode::PassThrough, CacheMode::WriteBack],
    };

    /// Returns a distribution in which this mode dominates. Write-back occurs only if it is this mode.
    pub(super) const fn mostly(mode: CacheMode) -> Self {
        let any_of = match mode {
            CacheMode::WriteBack => Self::ANY.any_of,
            _ => &[CacheMode::WriteThrough, CacheMode::WriteAround, CacheMode::PassThrough],
        };
        Self { mostly: Some(mode), any_of }
    }

    fn draw(self, random: &mut SeededRng) -> CacheMode {
        match self.mostly {
            Some(mode) if random.chance(700) => mode,
            _ => random.pick(self.any_of),
        }
    }
}

impl Cached {
    /// Returns whether dirty data may exist in the cache alone.
    fn writes_back(&self) -> bool {
        self.modes.any_of.contains(&CacheMode::WriteBack)
    }

    async fn open_once(&self, on: &Loop, disks: &Disks, mut random: SeededRng) -> Outcome<(Rc<Cache>, Place)> {
        let (below, fast, witness) = split(disks)?;
        let place = Place {
            modes: self.modes,
            lower: self.below.open(on, below, random.fork()).await?.device,
            fast: Rc::clone(fast),
            witness: Rc::clone(witness),
        };
        Ok((place.open(on, random).await?, place))
    }
}

/// Devices of a cache.
#[derive(Clone)]
struct Place {
    modes: ModeMix,
    lower: Rc<dyn BlockDevice>,
    fast: Rc<SimulatedDevice>,
    witness: Rc<SimulatedDevice>,
}

impl Place {
    fn open(&self, on: &Loop, random: SeededRng) -> impl Future<Output = Outcome<Rc<Cache>>> + use<> {
        self.clone().open_steps(on.downgrade(), random)
    }

    async fn open_steps(self, on: WeakLoop, mut random: SeededRng) -> Outcome<Rc<Cache>> {
        let failure_log = Noted::new(&self.witness);
        let detached = failure_log.read().await?;
        // `None` keeps the previous mode.
        let mode = random.chance(900).then(|| self.modes.draw(&mut random));
        let load_ahead = random.chance(500);
        let endurance = random.chance(300).then(|| random.pick(&[1, 8, 64]));
        let endurance = endurance.map(ByteLen::mib);
        let boot = boot_of(&self.fast, &mut random)?;
        let cleaning = CleanOptions {
            dirty_age: random.duration(Duration::from_micros(100), Duration::from_millis(100)),
            percent: random.pick(&[1, 20, 50, 100]),
            idle: random.duration(Duration::from_micros(100), Duration::from_millis(100)),
        };
        let checkpointing = PersistOptions {
            delay_max: random.duration(Duration::from_micros(100), Duration::from_millis(50)),
            lines_max: Some(random.pick(&[1, 4, 16, 64])),
        };
        let verdict = match random.chance(500) {
            true => Verdict::Unchanged,
            false => Verdict::Unproven,
        };
        let options = CacheOpenOptions {
            mode,
            disk: DiskId::default(),
            verdict,
            fingerprint: Box::new(Vec::new),
            failure: detached,
            failure_log: Box::new(failure_log),
            boot,
            cleaning,
            load_ahead,
            endurance,
            persist: checkpointing,
        };
        let opening = on.upgrade().map(|on| Cache::open(&on, self.lower, self.fast, options));
        Ok(opening.ok_or("the event loop has ended")?.await?)
    }

    /// Reopens a working cache while its disk is in use, as the program does when a new cache replaces it.
    async fn replace(
        &self,
        on: &WeakLoop,
        switch: &LayerSwitch,
        current_cache: &RefCell<Rc<Cache>>,
        random: SeededRng,
    ) {
        let old = Rc::clone(&current_cache.borrow());
        let hand_over = async || in_time(on, old.flush_dirty()).await.is_some_and(|done| done.is_ok());
        if !old.is_working() || !hand_over().await {
            return;
        }
        let Some(held_switch) = switch.pause() else { return };
        if in_time(on, held_switch.drain(on)).await.is_none() || !old.is_working() || !hand_over().await {
            return;
        }
        // A cache that is not closed is opened as after a kill.
        let _ = old.detach().await;
        let Some(opening) = on.upgrade().map(|on| self.open(&on, random)) else {
            return;
        };
        match in_time(on, opening).await {
            // A cache that cannot be closed records its failure. Here, unlike in the program, the record would be in
            // the new cache's failure log.
            Some(Ok(new)) if old.is_working() => {
                held_switch.replace_layer(Rc::clone(&new) as _);
                current_cache.replace(new);
            }
            // From now on there is no cache.
            _ => {
                // The old cache must not be trusted later: the program records that the disk is used without it.
                let (noted, whole_disk) = (Noted::new(&self.witness), ByteRange::new(0, u64::MAX >> 1));
                noted.record_failed().await.expect("the failure log's disk never fails");
                noted.record_superseded(whole_disk).await.expect("the failure log's disk never fails");
                held_switch.replace_layer(Rc::clone(&self.lower));
            }
        }
    }
}

/// Returns the result, unless it takes longer than a guest's requests may be delayed.
async fn in_time<T>(on: &WeakLoop, work: impl Future<Output = T>) -> Option<T> {
    let timeout = on.upgrade().map(|on| on.sleep(Duration::from_secs(5)))?;
    let timeout = async {
        timeout.await;
        None
    };
    first_of(async { Some(work.await) }, timeout).await
}

impl Stack for Cached {
    fn name(&self) -> &'static str {
        self.name
    }

    fn below(&self) -> Option<&'static dyn Stack> {
        Some(self.below)
    }

    /// Counts the cache's disk, and the failure log.
    fn own_disks(&self) -> usize {
        2
    }

    fn disks(&self, random: &mut SeededRng) -> Vec<Disk> {
        let mut disks = self.below.disks(random);
        disks
            .push(Disk { size: ByteLen::kib(random.pick(&[96, 100, 112, 128, 160, 256, 400])), ..Disk::small(random) });
        disks.push(Disk { size: ByteLen::new(NOTES * SECTOR), ..Disk::small(random) });
        disks
    }

    fn format<'a>(&'a self, on: &'a Loop, disks: &'a [Rc<SimulatedDevice>]) -> BoxFuture<'a, Outcome<()>> {
        Box::pin(async move {
            let (below, fast, _) = split(disks)?;
            self.below.format(on, below).await?;
            let mut random = SeededRng::new(fast.seed());
            let options = CacheCreateOptions {
                line_bits: if fast.geometry().size < ByteLen::kib(300) { 12 } else { random.between(12, 14) as u32 },
                mode: CacheMode::WriteThrough,
                uuid: [7; 16],
                disk: DiskId::default(),
                disk_size: disks[0].geometry().size,
            };
            let fast: Rc<dyn BlockDevice> = Rc::clone(fast) as _;
            create(&fast, &options).await?;
            Ok(())
        })
    }

    fn open<'a>(
        &'a self,
        on: &'a Loop,
        disks: &'a [Rc<SimulatedDevice>],
        mut random: SeededRng,
    ) -> BoxFuture<'a, Outcome<Opened>> {
        Box::pin(async move {
            if random.chance(100) {
                // A stop and a start by the user.
                self.open_once(on, disks, random.fork()).await?.0.close().await?;
            }
            let (cache, cache_devices) = self.open_once(on, disks, random).await?;
            let switch = Rc::new(LayerSwitch::new(Rc::clone(&cache_devices.lower), Rc::clone(&cache) as _));
            let (weak, weak_switch) = (on.downgrade(), Rc::downgrade(&switch));
            let now = Rc::new(RefCell::new(cache));
            let (changes, is_replaced) = (Rc::new(Cell::new(0)), self.is_replaced);
            let top: Rc<dyn BlockDevice> = match is_replaced {
                true => switch,
                false => Rc::clone(&now.borrow()) as _,
            };
            let change_settings: SettingsChange = Rc::new(move |random| {
                let mode = cache_devices.modes.draw(random);
                changes.set(changes.get() + 1);
                let (changes, number) = (Rc::clone(&changes), changes.get());
                let Some(on) = weak.upgrade() else { return };
                if let (true, Some(switch)) = (is_replaced && random.chance(500), weak_switch.upgrade()) {
                    let (cache_devices, now, random, running) =
                        (cache_devices.clone(), Rc::clone(&now), random.fork(), weak.clone());
                    on.spawn(async move { cache_devices.replace(&running, &switch, &now, random).await });
                    return;
                }
                let cache = Rc::clone(&now.borrow());
                on.spawn(async move {
                    // The mode has changed even if this fails.
                    let is_clean = cache.set_mode(mode).await.is_ok() && mode != CacheMode::WriteBack;
                    if is_clean && changes.get() == number {
                        assert_eq!(
                            cache.statistics().dirty_lines,
                            0,
                            "the cache still has dirty lines in mode {mode:?}"
                        );
                    }
                });
            });
            Ok(Opened { device: top, poke: Some(change_settings) })
        })
    }

    fn failing(&self, disks: usize) -> usize {
        self.below.failing(disks - self.own_disks()) + 1
    }

    /// Only the cache's disk may hang.
    fn may_hang(&self, disks: usize) -> Option<usize> {
        Some(disks - self.own_disks())
    }

    fn keeps_host_memory(&self) -> bool {
        self.writes_back() || self.below.keeps_host_memory()
    }

    /// With write-back, requests for dirty data fail repeatedly after the cache has failed.
    fn fails_only_with_a_disk(&self) -> bool {
        !self.writes_back()
    }
}

/// Number of sectors in the failure log; each holds a record or zeros. The first record marks the cache as failed,
/// each other one holds a superseded range.
const NOTES: u64 = 4096;

const SECTOR: u64 = 512;

struct Noted {
    disk: Rc<SimulatedDevice>,
    next: Cell<u64>,
}

impl Noted {
    fn new(disk: &Rc<SimulatedDevice>) -> Self {
        Self { disk: Rc::clone(disk), next: Cell::new(1) }
    }

    async fn read(&self) -> Outcome<Option<FailureRecord>> {
        let (mut is_detached, mut detached) = (false, FailureRecord::default());
        let written = self.disk.extents(ByteRange::new(0, NOTES * SECTOR), NOTES as usize);
        for Extent { range, kind } in written.await? {
            if kind != ExtentKind::Data {
                continue;
            }
            let mut bytes = vec![0; range.len.as_usize()];
            self.disk.read(range.start, ReadBuf::new(&mut bytes)).await?;
            for (record, bytes) in (range.start.get() / SECTOR..).zip(bytes.chunks_exact(SECTOR as usize)) {
                let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or_default());
                match (number(0), record) {
                    (0, _) => {}
                    (_, 0) => is_detached = true,
                    _ => {
                        self.next.set(record + 1);
                        detached.superseded.push(ByteRange::new(number(8), number(16)));
                    }
                }
            }
        }
        Ok(is_detached.then_some(detached))
    }

    async fn write(&self, note: u64, numbers: [u64; 3]) -> std::io::Result<()> {
        let mut bytes = [0; SECTOR as usize];
        for (place, number) in bytes.chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        let at = ByteOffset::new(note * SECTOR);
        let written = self.disk.write(at, WriteBuf::new(&bytes), WriteFlags::FUA);
        written.await.map_err(|error| std::io::Error::other(error.to_string()))
    }
}

impl FailureLog for Noted {
    fn record_failed(&self) -> BoxFuture<'_, std::io::Result<()>> {
        Box::pin(self.write(0, [1, 0, 0]))
    }

    fn record_superseded(&self, range: ByteRange) -> BoxFuture<'_, std::io::Result<()>> {
        let note = self.next.get();
        self.next.set(note + 1);
        Box::pin(self.write(note, [1, range.start.get(), range.len.get()]))
    }

    fn clear(&self) -> BoxFuture<'_, std::io::Result<()>> {
        Box::pin(async {
            while self.next.get() > 1 {
                self.next.set(self.next.get() - 1);
                self.write(self.next.get(), [0; 3]).await?;
            }
            self.write(0, [0; 3]).await
        })
    }
}

/// Returns the host's boot ID, which is new whenever the host has lost its memory.
fn boot_of(fast: &SimulatedDevice, random: &mut SeededRng) -> std::io::Result<[u8; 16]> {
    let file = fast.host_memory(0)?;
    let mut boot = [0; 16];
    if file.read_at(&mut boot, 0)? == 0 {
        boot[..8].copy_from_slice(&(random.between(1, u64::MAX - 1)).to_le_bytes());
        file.write_at(&boot, 0)?;
    }
    Ok(boot)
}

type Disks = [Rc<SimulatedDevice>];

fn split(disks: &Disks) -> Outcome<(&Disks, &Rc<SimulatedDevice>, &Rc<SimulatedDevice>)> {
    match disks {
        [below @ .., fast, witness] => Ok((below, fast, witness)),
        _ => Err("too few disks".into()),
    }
}

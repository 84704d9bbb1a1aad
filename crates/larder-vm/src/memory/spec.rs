//! User options for a VM's memory: those of `larder memory attach` and of `larder run --memory-...`, and the keys of
//! `[memory]` in a VM's file. All have the same names and the same checks.

use std::ffi::OsString;
use std::time::Duration;

use larder_block::{ByteLen, SizeError};
use rustix::process::Pid;

use super::range::{BudgetRange, BudgetRangeError};
use super::swap::SWAP_SIZE_MIN;
use super::{BUDGET_MIN, BudgetError, MemoryConfig, MemoryLimits, SwapConfig, check_budget, compressed_default};
use crate::disk_spec::join_argument;
use crate::disk_spec::keys::OptionProblem;
use crate::image::{ImageAddress, ImageAddressError, is_same_image};
use crate::run::keyval::parse_bool;

/// Longest quarantine, in milliseconds.
pub const QUARANTINE_MS_MAX: u64 = 600_000;

/// Keys of the memory options.
pub(crate) const KEYS: [&str; 13] = [
    "budget",
    "budget-min",
    "budget-low",
    "budget-high",
    "budget-max",
    "compressed",
    "swap-cache",
    "swap-size",
    "slow-store",
    "slow-size",
    "quarantine-ms",
    "prefetch",
    "encrypt",
];

/// Memory options, independent of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemorySpec {
    /// See [`MemoryConfig::budget`].
    pub budget: ByteLen,
    /// Bounds within which the budget may be moved.
    pub range: BudgetRange,
    /// Limit of compressed pages; `None` for the default share of the budget.
    pub compressed: Option<ByteLen>,
    /// Swap cache: receives the pages for which compressed RAM has no space.
    pub swap: Option<SwapConfig>,
    /// Slow store: receives the pages for which the swap cache has no space.
    pub slow: Option<SwapConfig>,
    /// Quarantine of pages; `None` to choose it by the process.
    pub quarantine: Option<Duration>,
    /// Prefetch pages.
    pub prefetch: bool,
    /// Encrypt data on the disks. `None` means yes, if there are disks.
    pub encrypt: Option<bool>,
}

/// Reason why options are invalid for every process.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum MemorySpecError {
    #[error("a budget of {0} is too small: the minimum is {BUDGET_MIN}, and 26 bytes for each page of the memory")]
    BudgetTooSmall(ByteLen),
    #[error(transparent)]
    Compressed(BudgetError),
    #[error(transparent)]
    Range(#[from] BudgetRangeError),
    #[error("{what} of {size} is too small; the minimum is {SWAP_SIZE_MIN}")]
    DiskTooSmall { what: &'static str, size: ByteLen },
    #[error("the swap cache and the slow store are both {0}; give each its own disk, or omit the slow store")]
    SameDisk(ImageAddress),
    #[error("there is nothing to encrypt without a swap cache or a slow store; give one, or omit encrypt")]
    NothingToEncrypt,
}

impl MemorySpec {
    /// Returns the default options with this budget.
    pub fn new(budget: ByteLen) -> Self {
        Self {
            budget,
            range: BudgetRange::default(),
            compressed: None,
            swap: None,
            slow: None,
            quarantine: None,
            prefetch: true,
            encrypt: None,
        }
    }

    /// Checks whether the options are valid for at least some memory size.
    ///
    /// # Errors
    /// They are invalid for all sizes.
    pub fn check(&self) -> Result<(), MemorySpecError> {
        match self.check_budget_for(0) {
            Ok(()) => {}
            Err(BudgetError::TooSmall { .. }) => return Err(MemorySpecError::BudgetTooSmall(self.budget)),
            Err(error) => return Err(MemorySpecError::Compressed(error)),
        }
        self.range.check(0, self.budget.get())?;
        for (what, disk) in [("a swap cache", &self.swap), ("a slow store", &self.slow)] {
            let size = disk.as_ref().and_then(|disk| disk.size);
            if let Some(size) = size.filter(|size| *size < SWAP_SIZE_MIN) {
                return Err(MemorySpecError::DiskTooSmall { what, size });
            }
        }
        if let (Some(swap), Some(slow)) = (&self.swap, &self.slow)
            && is_same_image(&swap.address, &slow.address)
        {
            return Err(MemorySpecError::SameDisk(slow.address.clone()));
        }
        if self.encrypt == Some(true) && !self.has_disk() {
            return Err(MemorySpecError::NothingToEncrypt);
        }
        Ok(())
    }

    /// Returns whether there is a tier below compressed RAM.
    fn has_disk(&self) -> bool {
        self.swap.is_some() || self.slow.is_some()
    }

    /// Returns whether data on the disks is to be encrypted.
    fn encrypts_disks(&self) -> bool {
        self.encrypt.unwrap_or(true)
    }

    /// Checks the budget for memory of `bytes`.
    ///
    /// # Errors
    /// The budget is too small.
    pub fn check_budget_for(&self, bytes: u64) -> Result<(), BudgetError> {
        check_budget(bytes, self.budget, self.compressed, self.has_disk()).map(|_| ())
    }

    /// Returns the configuration for the memory of this process.
    pub fn config(&self, pid: Pid) -> MemoryConfig {
        MemoryConfig {
            range: self.range,
            compressed: self.compressed,
            swap: self.swap.clone(),
            slow: self.slow.clone(),
            quarantine: self.quarantine,
            prefetch: self.prefetch,
            encrypt: self.encrypts_disks(),
            ..MemoryConfig::new(pid, self.budget)
        }
    }

    /// Returns the options that can be changed while memory is managed, with defaults filled in.
    pub fn limits(&self) -> MemoryLimits {
        let default_share = compressed_default(self.budget.get(), self.has_disk());
        MemoryLimits {
            budget: Some(self.budget),
            compressed: Some(self.compressed.unwrap_or(ByteLen::new(default_share))),
            range: Some(self.range),
        }
    }

    /// Returns the keys that differ from `other` and cannot be changed while memory is managed.
    pub fn restart_only_changes(&self, other: &Self) -> Vec<&'static str> {
        // The pattern names all fields, so that a new field cannot be forgotten here.
        let Self { budget: _, range: _, compressed: _, swap, slow, quarantine, prefetch, encrypt: _ } = self;
        let address = |disk: &Option<SwapConfig>| disk.as_ref().map(|disk| disk.address.clone());
        let size = |disk: &Option<SwapConfig>| disk.as_ref().and_then(|disk| disk.size);
        let all = [
            ("swap-cache", address(swap) != address(&other.swap)),
            ("swap-size", size(swap) != size(&other.swap)),
            ("slow-store", address(slow) != address(&other.slow)),
            ("slow-size", size(slow) != size(&other.slow)),
            ("quarantine-ms", *quarantine != other.quarantine),
            ("prefetch", *prefetch != other.prefetch),
            ("encrypt", self.encrypts_disks() != other.encrypts_disks()),
        ];
        let differing = all.into_iter().filter(|(_, differs)| *differs);
        differing.map(|(key, _)| key).collect()
    }

    /// Returns the options as arguments of `larder memory attach`. Sizes are in bytes, because the human-readable
    /// form is rounded.
    pub fn attach_arguments(&self) -> Vec<OsString> {
        let bytes = |option: &str, size: ByteLen| join_argument(option, size.get().to_string());
        let mut words = vec![bytes("--budget=", self.budget)];
        let bounds = [
            ("--budget-min=", self.range.min),
            ("--budget-low=", self.range.low),
            ("--budget-high=", self.range.high),
            ("--budget-max=", self.range.max),
        ];
        for (option, bound) in bounds {
            words.extend(bound.map(|bound| bytes(option, ByteLen::new(bound))));
        }
        words.extend(self.compressed.map(|size| bytes("--compressed=", size)));
        let disks = [("--swap-cache=", "--swap-size=", &self.swap), ("--slow-store=", "--slow-size=", &self.slow)];
        for (address_option, size, disk) in disks {
            let Some(disk) = disk else { continue };
            words.push(match &disk.address {
                ImageAddress::Path(path) => join_argument(address_option, path),
                ImageAddress::Nbd(uri) => join_argument(address_option, uri.to_string()),
            });
            words.extend(disk.size.map(|of| bytes(size, of)));
        }
        let quarantine = self.quarantine.map(|time| time.as_millis().to_string());
        words.extend(quarantine.map(|time| join_argument("--quarantine-ms=", time)));
        words.extend((!self.prefetch).then(|| "--prefetch=off".into()));
        words.extend(self.encrypt.map(|encrypt| match encrypt {
            true => "--encrypt=on".into(),
            false => "--encrypt=off".into(),
        }));
        words
    }
}

/// Options that are being parsed key by key.
#[derive(Debug, Default)]
pub(crate) struct MemorySpecParser {
    budget: Option<ByteLen>,
    range: BudgetRange,
    compressed: Option<ByteLen>,
    swap: (Option<ImageAddress>, Option<ByteLen>),
    slow: (Option<ImageAddress>, Option<ByteLen>),
    quarantine: Option<Duration>,
    prefetch: Option<bool>,
    encrypt: Option<bool>,
}

impl MemorySpecParser {
    /// Sets the option `key`, one of [`KEYS`], to `value`.
    pub(crate) fn set(&mut self, key: &str, value: &str) -> Result<(), OptionProblem> {
        let problem = |what: String| OptionProblem::InvalidValue(what);
        let size = || {
            let size = value.parse::<ByteLen>();
            size.map_err(|error: SizeError| problem(error.to_string()))
        };
        let disk = || match value {
            "" => Err(problem("give a path or an NBD URI".to_owned())),
            value => value.parse::<ImageAddress>().map_err(|error: ImageAddressError| problem(error.to_string())),
        };
        let switch = || parse_bool(value).ok_or_else(|| problem("give on or off, or true or false".to_owned()));
        match key {
            "budget" => self.budget = Some(size()?),
            "budget-min" => self.range.min = Some(size()?.get()),
            "budget-low" => self.range.low = Some(size()?.get()),
            "budget-high" => self.range.high = Some(size()?.get()),
            "budget-max" => self.range.max = Some(size()?.get()),
            "compressed" => self.compressed = Some(size()?),
            "swap-cache" => self.swap.0 = Some(disk()?),
            "swap-size" => self.swap.1 = Some(size()?),
            "slow-store" => self.slow.0 = Some(disk()?),
            "slow-size" => self.slow.1 = Some(size()?),
            "quarantine-ms" => {
                let time = value.parse().ok().filter(|time| *time <= QUARANTINE_MS_MAX);
                let time = time.ok_or_else(|| problem(format!("give milliseconds, at most {QUARANTINE_MS_MAX}")))?;
                self.quarantine = Some(Duration::from_millis(time));
            }
            "prefetch" => self.prefetch = Some(switch()?),
            "encrypt" => self.encrypt = Some(switch()?),
            _ => return Err(OptionProblem::UnknownKey),
        }
        Ok(())
    }

    /// Returns the complete options.
    ///
    /// # Errors
    /// The options contradict each other.
    pub(crate) fn finish(self) -> Result<MemorySpec, String> {
        let Some(budget) = self.budget else {
            return Err("there is no budget; add one, as in budget = \"1GiB\"".to_owned());
        };
        let disk = |(address, size): (Option<ImageAddress>, Option<ByteLen>), size_key, key| match (address, size) {
            (None, Some(_)) => Err(format!("{size_key} has no effect without {key}; give both, or neither")),
            (None, None) => Ok(None),
            (Some(address), size) => Ok(Some(SwapConfig { address, size })),
        };
        let wish = MemorySpec {
            range: self.range,
            compressed: self.compressed,
            swap: disk(self.swap, "swap-size", "swap-cache")?,
            slow: disk(self.slow, "slow-size", "slow-store")?,
            quarantine: self.quarantine,
            prefetch: self.prefetch.unwrap_or(true),
            encrypt: self.encrypt,
            ..MemorySpec::new(budget)
        };
        match wish.check() {
            Ok(()) => Ok(wish),
            Err(error) => Err(error.to_string()),
        }
    }
}

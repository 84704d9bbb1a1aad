//! What the control socket is told to do; the fields of its JSON are named as these are. Sizes are in bytes.

use larder_block::ByteLen;
use larder_prefetch::PrefetchOptions;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::state::LimitsState;
use crate::disk::DiskSettings;
use crate::image::{
    ImageAddress, PrefetchMemory, PrefetchMemoryError, Replacement, parse_cache_endurance, parse_cache_mode,
    parse_prefetch_len,
};
use crate::limits::LimitsTextError;
use crate::vm::VmMove;

/// What the VM's disks are to do: the body of `POST /v1/move`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MoveWish {
    /// What.
    pub step: VmMove,
}

/// What of a disk is hot: the answer to `GET /v1/disks/DISK/hot`, and the body of `POST` there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HotRanges {
    /// Ranges of the disk in units of 4 KiB, the hottest first: `17+3,4+1` are three from the 17th on, and the fourth.
    #[schema(
        pattern = r"^([0-9]{1,10}\+[0-9]{1,6}(,[0-9]{1,10}\+[0-9]{1,6})*)?$",
        max_length = 4000000
    )]
    pub ranges: String,
}

/// What a disk is set to: the body of `PATCH /v1/disks/DISK`. What is left out stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskPatch {
    /// All limits that there are to be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitsState>,
    /// How it is read ahead of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefetch: Option<PrefetchPatch>,
    /// What its cache does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<CachePatch>,
}

/// How a disk is read ahead of; what is left out is as usual.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PrefetchPatch {
    /// Bytes of memory; 0: nothing is read ahead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
    /// By how many bytes at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ahead: Option<u64>,
    /// Reads of more bytes than this are not read ahead of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub largest_read: Option<u64>,
}

/// What a cache does; what is left out stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CachePatch {
    /// What shall be done with writes: `wt`, `wb`, `wa` or `pt`, as `--cache-mode` has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// Bytes that may be written to its device in a day; 0: any number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endurance: Option<u64>,
}

/// Why a wish cannot be fulfilled, as a text for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// It is not as it is described to be.
    Wrong(String),
    /// It is, but makes no sense.
    Senseless(String),
}

impl From<String> for Unfit {
    fn from(why: String) -> Self {
        Self::Wrong(why)
    }
}

impl DiskPatch {
    /// What is to be set.
    ///
    /// # Errors
    /// See [`Unfit`].
    pub fn settings(&self) -> Result<DiskSettings, Unfit> {
        let limits = self.limits.as_ref().map(LimitsState::limits).transpose();
        let limits = limits.map_err(|error| {
            let why = format!("limits: {error}");
            match error {
                LimitsTextError::Limit(_) => Unfit::Senseless(why),
                _ => Unfit::Wrong(why),
            }
        })?;
        let cache = self.cache.clone().unwrap_or_default();
        let mode = cache.mode.map(|mode| match parse_cache_mode(&mode) {
            Ok(known) => Ok(known),
            Err(error) => Err(format!("cache: mode '{mode}': {error}")),
        });
        let endurance = cache.endurance.map(|bytes| match bytes {
            0 => Ok(None),
            bytes => parse_cache_endurance(&bytes.to_string()).map(Some),
        });
        Ok(DiskSettings {
            limits,
            prefetch: self.prefetch.as_ref().map(PrefetchPatch::options).transpose()?,
            cache_endurance: endurance
                .transpose()
                .map_err(|error| format!("cache: endurance: {error}"))?,
            cache_mode: mode.transpose()?,
        })
    }
}

impl PrefetchPatch {
    fn options(&self) -> Result<PrefetchOptions, String> {
        let usual = PrefetchOptions::default();
        let memory = match self.memory {
            Some(0) => PrefetchMemory::Off,
            Some(bytes) => {
                let memory = bytes.to_string().parse();
                memory.map_err(|error: PrefetchMemoryError| format!("prefetch: memory: {error}"))?
            }
            None => PrefetchMemory::DEFAULT,
        };
        let len = |name: &str, bytes: Option<u64>, usual: ByteLen| match bytes {
            Some(bytes) => parse_prefetch_len(&bytes.to_string()).map_err(|error| format!("prefetch: {name}: {error}")),
            None => Ok(usual),
        };
        let ahead_max = len("ahead", self.ahead, usual.ahead_max)?;
        let largest_read = len("largest_read", self.largest_read, usual.largest_read)?;
        Ok(match memory {
            PrefetchMemory::Off => PrefetchOptions::OFF,
            PrefetchMemory::Size(memory) => PrefetchOptions {
                memory,
                largest_read,
                ahead_max,
            },
        })
    }
}

/// What a cache shall be replaced by: the body of `POST /v1/disks/DISK/cache/replace`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CacheReplacement {
    /// The file, block device or NBD export that the new one is on, a path from the root on; `None`: where the old one is.
    #[serde(default)]
    pub with: Option<String>,
    /// Bytes of its file if that is made; `None`: as many as the old one has.
    #[serde(default)]
    pub size: Option<u64>,
    /// Whether what only the old one has may be lost.
    #[serde(default)]
    pub lose_dirty: bool,
}

impl CacheReplacement {
    /// What it means.
    ///
    /// # Errors
    /// See [`Unfit`].
    pub fn replacement(&self) -> Result<Replacement, Unfit> {
        let file = self.with.as_ref().map(|with| with.parse::<ImageAddress>());
        let file = file
            .transpose()
            .map_err(|error| Unfit::Senseless(format!("with: {error}")))?;
        match &file {
            Some(ImageAddress::Path(path)) if !path.is_absolute() => {
                let why = format!("with '{}': a path begins at the root here", path.display());
                return Err(Unfit::Wrong(why));
            }
            _ => {}
        }
        Ok(Replacement {
            file,
            size: self.size.map(ByteLen::new),
            lose_dirty: self.lose_dirty,
        })
    }
}

/// What became of a reload: the answer to `POST /v1/reload`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Reloaded {
    /// What is otherwise than before, a text for people each.
    pub changed: Vec<String>,
    /// What the file says and what the VM will have only when its server is started again, or its user has left.
    pub left: Vec<String>,
    /// What could not be done, and why.
    pub failed: Vec<String>,
}

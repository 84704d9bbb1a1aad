//! Requests to the control socket. The fields of the JSON have the names of these fields. Sizes are in bytes.

use larder_block::ByteLen;
use larder_prefetch::PrefetchOptions;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::state::LimitsState;
use crate::disk::DiskSettings;
use crate::image::{
    ImageAddress, PrefetchMemory, PrefetchMemoryError, ReplaceOptions, parse_cache_endurance, parse_cache_mode,
    parse_prefetch_len,
};
use crate::limits::LimitsTextError;
use crate::vm::MoveStep;

/// Step of a move for the VM's disks: the body of `POST /v1/move`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MoveRequest {
    /// The step.
    pub step: MoveStep,
}

/// Hot ranges of a disk: the answer to `GET /v1/disks/DISK/hot`, and the body of `POST` there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HotRanges {
    /// Ranges of the disk in units of 4 KiB, the hottest first: `17+3,4+1` means units 17 to 19, and unit 4.
    #[schema(pattern = r"^([0-9]{1,10}\+[0-9]{1,6}(,[0-9]{1,10}\+[0-9]{1,6})*)?$", max_length = 4000000)]
    pub ranges: String,
}

/// Settings of a disk: the body of `PATCH /v1/disks/DISK`. Settings that are left out do not change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskPatch {
    /// All limits; limits that are not in the list are removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitsState>,
    /// Read-ahead settings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefetch: Option<PrefetchPatch>,
    /// Cache settings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<CachePatch>,
}

/// Read-ahead settings of a disk; those that are left out get their defaults.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PrefetchPatch {
    /// Memory in bytes; 0 turns read-ahead off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
    /// Maximum read-ahead distance in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ahead: Option<u64>,
    /// Longest read in bytes that causes read-ahead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub largest_read: Option<u64>,
}

/// Cache settings; those that are left out do not change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CachePatch {
    /// Write policy: `wt`, `wb`, `wa` or `pt`, as in `--cache-mode`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// Limit for the bytes written to the cache's device per day; 0 for no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endurance: Option<u64>,
}

/// Reason why a request is refused, as a message for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestError {
    /// The request does not match its description.
    Malformed(String),
    /// The request matches its description, but its values are not possible.
    Inconsistent(String),
}

impl From<String> for RequestError {
    fn from(why: String) -> Self {
        Self::Malformed(why)
    }
}

impl DiskPatch {
    /// Returns the settings.
    ///
    /// # Errors
    /// See [`RequestError`].
    pub fn settings(&self) -> Result<DiskSettings, RequestError> {
        let limits = self.limits.as_ref().map(LimitsState::limits).transpose();
        let limits = limits.map_err(|error| {
            let why = format!("limits: {error}");
            match error {
                LimitsTextError::Limit(_) => RequestError::Inconsistent(why),
                _ => RequestError::Malformed(why),
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
            cache_endurance: endurance.transpose().map_err(|error| format!("cache: endurance: {error}"))?,
            cache_mode: mode.transpose()?,
        })
    }
}

impl PrefetchPatch {
    fn options(&self) -> Result<PrefetchOptions, String> {
        let default = PrefetchOptions::default();
        let memory = match self.memory {
            Some(0) => PrefetchMemory::Off,
            Some(bytes) => {
                let memory = bytes.to_string().parse();
                memory.map_err(|error: PrefetchMemoryError| format!("prefetch: memory: {error}"))?
            }
            None => PrefetchMemory::DEFAULT,
        };
        let len = |name: &str, bytes: Option<u64>, default: ByteLen| match bytes {
            Some(bytes) => parse_prefetch_len(&bytes.to_string()).map_err(|error| format!("prefetch: {name}: {error}")),
            None => Ok(default),
        };
        let ahead_max = len("ahead", self.ahead, default.ahead_max)?;
        let largest_read = len("largest_read", self.largest_read, default.largest_read)?;
        Ok(match memory {
            PrefetchMemory::Off => PrefetchOptions::OFF,
            PrefetchMemory::Size(memory) => PrefetchOptions { memory, largest_read, ahead_max },
        })
    }
}

/// Options for replacing a cache: the body of `POST /v1/disks/DISK/cache/replace`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CacheReplacement {
    /// File, block device or NBD export of the new cache; a path must be absolute. `null`: that of the old cache.
    #[serde(default)]
    pub with: Option<String>,
    /// Size in bytes of a new file; `null`: that of the old cache.
    #[serde(default)]
    pub size: Option<u64>,
    /// Dirty data in the old cache may be lost.
    #[serde(default)]
    pub lose_dirty: bool,
}

impl CacheReplacement {
    /// Returns the parsed options.
    ///
    /// # Errors
    /// See [`RequestError`].
    pub fn replacement(&self) -> Result<ReplaceOptions, RequestError> {
        let file = self.with.as_ref().map(|with| with.parse::<ImageAddress>());
        let file = file.transpose().map_err(|error| RequestError::Inconsistent(format!("with: {error}")))?;
        match &file {
            Some(ImageAddress::Path(path)) if !path.is_absolute() => {
                let why = format!("with '{}': the path must be absolute", path.display());
                return Err(RequestError::Malformed(why));
            }
            _ => {}
        }
        Ok(ReplaceOptions { file, size: self.size.map(ByteLen::new), lose_dirty: self.lose_dirty })
    }
}

/// Result of a reload: the answer to `POST /v1/reload`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReloadResult {
    /// Changes that were made, one message each.
    pub changed: Vec<String>,
    /// Changes in the file that take effect only when the VM's server is restarted, or when the disk's client has
    /// disconnected.
    pub left: Vec<String>,
    /// Changes that failed, with the reasons.
    pub failed: Vec<String>,
}

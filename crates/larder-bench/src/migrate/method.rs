//! Methods of moving the guest, and the configuration of both QEMUs for each.

use clap::{ValueEnum, builder::PossibleValue};
use larder_bench::campaign::migration::vm::Vm;
use serde_json::{Value, json};

use super::Arguments;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Method {
    /// QEMU over one channel, uncompressed.
    Qemu,
    Xbzrle,
    Multifd,
    MultifdZlib,
    MultifdZstd,
    /// `larder migrate`, for the whole move.
    Larder,
}

impl Method {
    pub(super) const DEFAULT: [Self; 5] =
        [Self::Qemu, Self::Xbzrle, Self::MultifdZlib, Self::MultifdZstd, Self::Larder];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Qemu => "qemu",
            Self::Xbzrle => "xbzrle",
            Self::Multifd => "multifd",
            Self::MultifdZlib => "multifd-zlib",
            Self::MultifdZstd => "multifd-zstd",
            Self::Larder => "larder",
        }
    }

    /// Configures QEMU at either side, replacing the settings of the previous move.
    pub(super) fn prepare(self, vm: &mut Vm, arguments: &Arguments) -> anyhow::Result<()> {
        let compression = match self {
            Self::MultifdZlib => "zlib",
            Self::MultifdZstd => "zstd",
            _ => "none",
        };
        let multifd = matches!(self, Self::Multifd | Self::MultifdZlib | Self::MultifdZstd);
        let capabilities = [
            ("return-path", true),
            ("events", true),
            ("xbzrle", self == Self::Xbzrle),
            ("multifd", multifd),
            ("pause-before-switchover", false),
        ];
        let list: Vec<Value> =
            capabilities.into_iter().map(|(name, on)| json!({"capability": name, "state": on})).collect();
        vm.ask("migrate-set-capabilities", &json!({"capabilities": list}))?;
        vm.ask(
            "migrate-set-parameters",
            &json!({
                // Unlimited.
                "max-bandwidth": 100_u64 << 30,
                "downtime-limit": arguments.downtime,
                "multifd-channels": arguments.channels,
                "multifd-compression": compression,
                "multifd-zlib-level": 1,
                "multifd-zstd-level": 1,
                // A cache smaller than the changed memory has no effect. The size must be a power of two.
                "xbzrle-cache-size": (arguments.memory << 20).next_power_of_two(),
            }),
        )?;
        Ok(())
    }
}

impl ValueEnum for Method {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Qemu, Self::Xbzrle, Self::Multifd, Self::MultifdZlib, Self::MultifdZstd, Self::Larder]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let help = match self {
            Self::Qemu => "QEMU, uncompressed pages",
            Self::Xbzrle => "QEMU, XBZRLE: deltas to the pages sent before",
            Self::Multifd => "QEMU over several channels, uncompressed pages",
            Self::MultifdZlib => "QEMU over several channels, zlib 1",
            Self::MultifdZstd => "QEMU over several channels, zstd 1",
            Self::Larder => "larder migrate",
        };
        Some(PossibleValue::new(self.name()).help(help))
    }
}

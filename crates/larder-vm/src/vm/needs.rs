//! Resources that a VM's process needs after it is confined.

use super::config::VmConfig;
use crate::confine::Needs;
use crate::image::{ChainPolicy, ImageAddress};
use crate::private_folder;

/// Returns the needs of the process that serves `config`.
pub(super) fn of(config: &VmConfig) -> Needs {
    let mut needs = Needs::default();
    for disk in &config.disks {
        let wish = &disk.wish;
        let mut connect = |address: &ImageAddress| {
            if let ImageAddress::Nbd(uri) = address {
                needs.connect_to(&uri.address);
            }
        };
        connect(&wish.image);
        wish.disk_cache.file.iter().for_each(&mut connect);
        if let ChainPolicy::Pinned { chain, .. } = &wish.chain {
            chain.data_file.iter().for_each(&mut connect);
            for image in &chain.backing {
                connect(&image.image);
                image.data_file.iter().for_each(&mut connect);
            }
        }
    }
    for folder in [private_folder::runtime(), private_folder::state()]
        .into_iter()
        .flatten()
    {
        needs.have(folder);
    }
    needs
}

//! The backing files of an image, as far as they can be opened, and the journals that killed servers left for them.

use larder_block::Loop;
use larder_qcow2::header::Header;
use larder_qcow2::read_header;
use larder_vm::image::journal::{JournalStatus, status};
use larder_vm::image::{Author, Format, ImageAddress, check_author, dirty_caches, is_same_image};

use crate::cli::FormatName;
use crate::disk_image::{self, Sharing};

/// Maximum number of backing files that are followed.
const CHAIN_MAX: usize = 200;

/// A backing file of an image.
pub(crate) struct ChainLayer {
    pub(crate) image: ImageAddress,
    /// Format that the image above names, or the detected one.
    pub(crate) format: String,
    pub(crate) virtual_size: Option<u64>,
    /// Another process has the file open for writing, or prevents others from writing.
    pub(crate) in_use: bool,
    /// Journal or session that a killed server left; `Clean` while the file is in use.
    pub(crate) left_behind: JournalStatus,
    /// Caches that may have data which the file lacks.
    pub(crate) dirty_caches: Vec<ImageAddress>,
    /// Reason why the file could not be opened.
    pub(crate) error: Option<String>,
    /// The file was not opened because this process, as root, does not trust the header that names it.
    pub(crate) is_refused: bool,
}

/// Properties of a backing file that was opened.
struct OpenedLayer {
    format: Format,
    author: Author,
    virtual_size: u64,
    in_use: bool,
    left_behind: JournalStatus,
    header: Option<Header>,
}

/// Returns the backing files of the image at `top`, nearest first. `author` is the author of its header. Unless
/// `trust_image` is set, root opens no file that another user could have chosen.
pub(crate) async fn backing_files(
    on: &Loop,
    (top, author): (&ImageAddress, Author),
    header: &Header,
    trust_image: bool,
) -> Vec<ChainLayer> {
    let mut layers: Vec<ChainLayer> = Vec::new();
    let (mut overlay, mut author) = (top.clone(), author);
    let (mut name, mut format) = (header.backing_file.clone(), header.backing_format.clone());
    while let Some(backing) = name.take() {
        let address = ImageAddress::relative_to(&overlay, &backing);
        let named_format = match format.as_deref().and_then(Format::from_driver) {
            Some(Format::Raw) => Some(FormatName::Raw),
            Some(Format::Qcow2) => Some(FormatName::Qcow2),
            None => None,
        };
        let refused = address.as_ref().ok().and_then(|address| {
            let followed = check_author((&overlay, author), &backing, address, trust_image);
            followed.err().map(|error| error.to_string())
        });
        let image = address.clone().unwrap_or_else(|_| ImageAddress::Path(backing.into()));
        let mut layer = ChainLayer {
            format: format.take().unwrap_or_else(|| "not named".to_owned()),
            virtual_size: None,
            in_use: false,
            left_behind: JournalStatus::Clean,
            dirty_caches: Vec::new(),
            error: None,
            is_refused: refused.is_some(),
            image,
        };
        let is_repeated =
            || is_same_image(top, &layer.image) || layers.iter().any(|seen| is_same_image(&seen.image, &layer.image));
        layer.error = if let Err(error) = address {
            Some(error.to_string())
        } else if refused.is_some() {
            refused
        } else if is_repeated() {
            Some("it is already in this chain, which is a cycle and cannot be opened; `qemu-img rebase -u` can name another backing file".to_owned())
        } else if layers.len() >= CHAIN_MAX {
            Some(format!("it is the {CHAIN_MAX}th of the chain, which is too long to be opened"))
        } else {
            None
        };
        if layer.error.is_some() {
            layers.push(layer);
            break;
        }
        match inspect_layer(on, &layer.image, named_format, trust_image).await {
            Ok(found) => {
                author = found.author;
                if named_format.is_none() {
                    layer.format = format!("{}, detected", found.format.name());
                }
                layer.dirty_caches = dirty_caches(&layer.image, found.format);
                layer.virtual_size = Some(found.virtual_size);
                (layer.in_use, layer.left_behind) = (found.in_use, found.left_behind);
                if let Some(header) = found.header {
                    (name, format) = (header.backing_file, header.backing_format);
                }
            }
            Err(error) => layer.error = Some(error.to_string()),
        }
        overlay = layer.image.clone();
        layers.push(layer);
    }
    layers
}

async fn inspect_layer(
    on: &Loop,
    image: &ImageAddress,
    format: Option<FormatName>,
    trust_image: bool,
) -> anyhow::Result<OpenedLayer> {
    // Users are looked up before the file is opened, as for the image itself.
    let in_use = disk_image::processes_using(image).is_some();
    let opened = disk_image::open(on, image, format, Sharing::Backing { trust_image }).await?;
    let author = opened.author;
    Ok(match opened.format {
        Format::Raw => OpenedLayer {
            format: Format::Raw,
            author,
            virtual_size: opened.file.geometry().size.get(),
            in_use,
            left_behind: JournalStatus::Clean,
            header: None,
        },
        Format::Qcow2 => {
            let header = read_header(&opened.file).await?;
            OpenedLayer {
                format: Format::Qcow2,
                author,
                virtual_size: header.size,
                in_use,
                left_behind: match in_use {
                    true => JournalStatus::Clean,
                    false => status(image, &header)?,
                },
                header: Some(header),
            }
        }
    })
}
